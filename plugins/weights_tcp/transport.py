"""Transfer of weights from one machine to another: the publisher serves its versions, and readers pull them.

A reader opens a connection, sends one line with its request, and receives one line that describes the response and then
the buckets one by one. A replaced engine can request a version again, and a reader that dies affects no other reader.

    reader      {"name": ..., "proof": ..., "version": 3, "table_only": false}
    publisher   {"status": "ok", "digests": ..., "buckets": [[bytes, pieces], ...]}, and the bytes

Nothing is encrypted. A request is served only with a proof that its sender has the handle. The proof prevents mistakes.
It does not stop an attacker who can read or write on the network, so bind to an address of a trusted network.
"""

from __future__ import annotations

import hmac
import json
import logging
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from components.net.listening import listen_at
from components.weights.buckets import Piece, pieces_of
from components.weights.folder import OpenVersion, prove
from components.weights.transport import RemoteVersion, VersionServer, WeightTransport

_log = logging.getLogger(__name__)
_REQUEST_BYTES = 4096


class TCPTransport(WeightTransport):
    """The weight transport "tcp"."""

    def serve(
        self, host: str, token: str, find: Callable[[int], OpenVersion | None], timeout_seconds: float
    ) -> VersionServer:
        return WeightServer(host, token, find, timeout_seconds)

    def fetch(
        self, address: tuple[str, int], token: str, version: int, timeout_seconds: float, table_only: bool = False
    ) -> RemoteVersion:
        return fetch(address, token, version, timeout_seconds, table_only)


class WeightServer(VersionServer):
    """Serves versions from threads of the publisher's process, one thread per reader."""

    def __init__(
        self, host: str, token: str, find: Callable[[int], OpenVersion | None], timeout_seconds: float
    ) -> None:
        """
        Args:
            host: address to bind to, as the readers reach it, or a host name of it.
            token: token that readers must prove to have.
            find: opens a version; returns None if it was deleted.
            timeout_seconds: timeout of each bucket.
        """
        self._token = token
        self._find = find
        self._timeout_seconds = timeout_seconds
        self._listening = listen_at(host)
        # An IPv6 address has two more numbers.
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._transfers: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._serve, name="weight-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Returns when all running transfers have ended."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()
        for transfer in self._transfers:
            transfer.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return  # `close` has shut the socket down
            # Finished threads are dropped, so that the list does not grow with every version.
            self._transfers = [transfer for transfer in self._transfers if transfer.is_alive()]
            transfer = threading.Thread(target=self._transfer, args=(connection,), daemon=True)
            self._transfers.append(transfer)
            transfer.start()

    def _transfer(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as lines:
                connection.settimeout(self._timeout_seconds)
                self._answer(connection, **json.loads(lines.readline(_REQUEST_BYTES)))
        except (OSError, ValueError, TypeError) as error:
            # The reader died, or is too slow. A living reader requests the version again.
            _log.warning("weights: a reader was not served to the end: %s", error)

    def _answer(self, connection: socket.socket, *, name: str, proof: str, version: int, table_only: bool) -> None:
        if not hmac.compare_digest(proof, prove(self._token, name)):
            connection.sendall(_line({"status": "refused: the handle is another publisher's"}))
            return
        opened = self._find(version)
        if opened is None:
            connection.sendall(_line({"status": "gone"}))
            return
        tables = [(flat.numel(), pieces) for pieces, flat in opened.buckets]
        connection.sendall(_line({"status": "ok", "digests": opened.digests, "buckets": tables}))
        if table_only:
            return
        for _, flat in opened.buckets:
            try:
                connection.sendall(flat.numpy().data)
            except OSError as error:
                raise OSError(f"version {version} stopped on its way ({error})") from error


def fetch(
    address: tuple[str, int], token: str, version: int, timeout_seconds: float, table_only: bool = False
) -> RemoteVersion:
    """Request a version from a publisher.

    Args:
        address: address of the publisher.
        token: token of the handle.
        version: version to fetch.
        timeout_seconds: timeout of the response, and of pauses within a bucket.
        table_only: True to fetch names, dtypes, shapes and digests without the payload.

    Raises:
        FileNotFoundError: the publisher has deleted the version.
        PermissionError: there is another publisher at the address.
        ConnectionError: nothing listens at the address, or no response came in time.
    """
    where = f"the publisher of the weights at {address[0]}:{address[1]}"
    name = uuid.uuid4().hex
    request = {"name": name, "proof": prove(token, name), "version": version, "table_only": table_only}
    try:
        with socket.create_connection(address, timeout_seconds) as connection:
            stream = connection.makefile("rb")  # keeps the connection open after the `with` block
            connection.sendall(_line(request))
        header = json.loads(stream.readline())
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"{where} did not respond within {timeout_seconds:g} s ({error}); see whether its process lives and its "
            "address is reachable from here"
        ) from error
    if header["status"] == "gone":
        raise FileNotFoundError(f"version {version} was unlinked at {where}; receive the newest handle")
    if header["status"] != "ok":
        raise PermissionError(f"{where} {header['status']}")
    tables = [[Piece.from_json(piece) for piece in table] for _, table in header["buckets"]]
    sizes = [size for size, _ in header["buckets"]]
    return RemoteVersion(tables, header["digests"], _payload(stream, sizes, tables, where))


def _line(content: object) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _payload(stream: Any, sizes: list[int], tables: list[list[Piece]], where: str) -> Iterator[tuple[str, Tensor]]:
    for size, table in zip(sizes, tables, strict=True):
        flat = torch.empty(size, dtype=torch.uint8)
        try:
            if stream.readinto(flat.numpy().data) < size:
                raise ConnectionError("it closed the connection")
        except OSError as error:
            raise ConnectionError(f"the weights stopped coming from {where} ({error}); ask again") from error
        *most, last = pieces_of(flat, table)
        yield from most
        # The consumer's loop variable keeps the last tensor while it waits for the next bucket. As a view it would keep
        # the whole bucket, so the last tensor is copied and all views are dropped.
        name, tensor = last
        copy = tensor.clone()
        del flat, most, last, tensor
        yield name, copy
