"""Weights from one machine to another: the publisher serves its versions, and readers pull them.

A reader leaves a request in the publisher's TCPStore; the two make a process group of their own, beside any other that
they have, and the buckets go through it one by one. So an engine that was replaced asks again, and readers that die
disturb nobody.

TCPStore and gloo neither encrypt nor authenticate. A request is served only with proof that its sender has the handle,
which keeps out mistakes, and not an attacker who can read or write on that network: bind to an address of a network
that you trust.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from queue import Empty, Queue
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage] (documented as torch.distributed's)
    ProcessGroupGloo,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage] (likewise)
)

from components.engines.weight_buckets import Piece, pieces_of
from components.engines.weight_folder import OpenVersion

_log = logging.getLogger(__name__)
_REQUESTS, _STOP = "requests", b"stop"
_FOREVER = timedelta(days=3650)
T = TypeVar("T")


def prove(token: str, what: str) -> str:
    """Shows that one has the token, without showing the token."""
    return hmac.digest(token.encode(), what.encode(), hashlib.sha256).hex()


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a reader wants."""

    id: str
    proof: str
    version: int
    backend: str
    """"gloo" or "nccl"."""
    table_only: bool
    """Names, dtypes, shapes and digests, without the payload."""


class WeightServer:
    """Serves versions from side threads of the publisher's process, one for each reader."""

    def __init__(
        self, host: str, token: str, find: Callable[[int], OpenVersion | None], timeout_seconds: float
    ) -> None:
        """
        Args:
            host: address to bind to, as the readers reach it; IPv4, or a name of one.
            token: what readers must have.
            find: opens a version; None when it is gone.
            timeout_seconds: for every single send.
        """
        self._token = token
        self._find = find
        self._timeout = timedelta(seconds=timeout_seconds)
        self.host = socket.gethostbyname(host)
        # TCPStore alone would listen on all addresses of the machine.
        listening = socket.create_server((self.host, 0))
        self.port: int = listening.getsockname()[1]
        self._store = TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listening.detach(),
        )
        self._transfers: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._serve, name="weight-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends when the transfers that have begun have ended."""
        self._store.queue_push(_REQUESTS, _STOP)
        self._thread.join()
        for transfer in self._transfers:
            transfer.join()

    def _serve(self) -> None:
        store = TCPStore(self.host, self.port, is_master=False, timeout=_FOREVER)
        while (message := store.queue_pop(_REQUESTS)) != _STOP:
            self._transfers = [transfer for transfer in self._transfers if transfer.is_alive()]
            try:
                request = Request(**json.loads(message))
            except (ValueError, TypeError) as error:
                _log.warning("weights: a request that nobody understands was dropped: %s", error)
                continue
            transfer = threading.Thread(target=self._transfer, args=(request,), daemon=True)
            self._transfers.append(transfer)
            transfer.start()

    def _transfer(self, request: Request) -> None:
        try:
            # A connection of its own: one that waits lets no other thread use it.
            store = TCPStore(self.host, self.port, is_master=False, timeout=self._timeout)
            if not hmac.compare_digest(request.proof, prove(self._token, request.id)):
                store.set(f"reply/{request.id}", "refused: the handle is another publisher's")
                return
            opened = self._find(request.version)
            if opened is None:
                store.set(f"reply/{request.id}", "gone")
                return
            store.set(f"reply/{request.id}", "ok")
            pair = _Pair(request.backend, store, request.id, 0, self.host, self._timeout)
            header = {"digests": opened.digests, "buckets": [(flat.numel(), pieces) for pieces, flat in opened.buckets]}
            pair.send_object(header)
            for _, flat in () if request.table_only else opened.buckets:
                pair.send(flat)
        except (OSError, RuntimeError, ValueError) as error:
            # Of a reader that is gone, or so slow that it counts as gone: it will ask again if it lives.
            _log.warning("weights: version %d did not reach a reader: %s", request.version, error)


@dataclass(frozen=True)
class RemoteVersion:
    """A version at the publisher's, with its payload on the way."""

    tables: list[list[Piece]]
    digests: dict[str, str] | None
    tensors: Iterator[tuple[str, Tensor]]
    """One bucket at a time is held here, and longer by who keeps its tensors."""


def fetch(
    address: tuple[str, int], token: str, version: int, backend: str, timeout_seconds: float, table_only: bool = False
) -> RemoteVersion:
    """Ask a publisher for a version.

    Raises:
        FileNotFoundError: the publisher has it no more.
        PermissionError: the publisher at the address is another one.
        ConnectionError: nobody is there, or no answer came in time.
    """
    where = f"the publisher of the weights at {address[0]}:{address[1]}"
    own = uuid.uuid4().hex
    request = Request(id=own, proof=prove(token, own), version=version, backend=backend, table_only=table_only)
    try:
        reply, pair = _within(timeout_seconds, lambda: _ask(address, request, timedelta(seconds=timeout_seconds)))
        header = {} if pair is None else _within(timeout_seconds, pair.receive_object)
    except (OSError, RuntimeError) as error:
        raise ConnectionError(
            f"{where} did not answer within {timeout_seconds:g} s ({_first_line(error)}); see whether its process "
            "lives and its address is reachable from here"
        ) from error
    if pair is None:
        if reply == "gone":
            raise FileNotFoundError(f"version {version} was unlinked at {where}; receive the newest handle")
        raise PermissionError(f"{where} {reply}")
    tables = [
        [Piece(name, dtype, tuple(shape), at) for name, dtype, shape, at in table] for _, table in header["buckets"]
    ]
    sizes = [size for size, _ in header["buckets"]]
    return RemoteVersion(tables, header["digests"], _payload(pair, sizes, tables, where))


def _ask(address: tuple[str, int], request: Request, timeout: timedelta) -> tuple[str, _Pair | None]:
    # First a plain connection: it fails at once where TCPStore continues trying, and knows our own address.
    with closing(socket.create_connection(address, timeout.total_seconds())) as probe:
        own_host: str = probe.getsockname()[0]
    store = TCPStore(*address, is_master=False, timeout=timeout)
    store.queue_push(_REQUESTS, json.dumps(asdict(request)).encode())
    reply = store.get(f"reply/{request.id}").decode()
    store.delete_key(f"reply/{request.id}")
    return reply, _Pair(request.backend, store, request.id, 1, own_host, timeout) if reply == "ok" else None


def _within(seconds: float, what: Callable[[], T]) -> T:
    """TCPStore waits without end for a process that is stopped; so it waits in a thread that can be left behind."""
    results: Queue[tuple[T | None, Exception | None]] = Queue()

    def run() -> None:
        try:
            results.put((what(), None))
        except (OSError, RuntimeError) as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except Empty:
        raise TimeoutError("no sign of life") from None
    if error is not None:
        raise error
    return cast(T, result)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _payload(pair: _Pair, sizes: list[int], tables: list[list[Piece]], where: str) -> Iterator[tuple[str, Tensor]]:
    for size, table in zip(sizes, tables, strict=True):
        flat = torch.empty(size, dtype=torch.uint8, device=pair.device)
        try:
            pair.receive(flat)
        except RuntimeError as error:
            raise ConnectionError(
                f"the weights stopped coming from {where} ({_first_line(error)}); ask again"
            ) from error
        *most, last = pieces_of(flat, table)
        yield from most
        # A loop holds its last tensor while it waits for the next: it shall not hold the whole bucket by that.
        most, last, flat = [], (last[0], last[1].clone()), None
        yield last


class _Pair:
    """A process group of the publisher (rank 0) and one reader (rank 1).

    On CUDA it is NCCL's. That has never been run.
    """

    def __init__(self, backend: str, store: TCPStore, name: str, rank: int, host: str, timeout: timedelta) -> None:
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._peer = 1 - rank
        prefixed = PrefixStore(f"pair/{name}", store)
        self._group: Any
        if backend == "nccl":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = ProcessGroupNCCL(prefixed, rank, 2, options)
        else:
            # The only way to name the address that gloo binds to, which is otherwise what the host's name stands for.
            options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue] (not in the stubs)
            options._timeout = timeout
            options._devices = [ProcessGroupGloo.create_device(hostname=host)]
            self._group = ProcessGroupGloo(prefixed, rank, 2, options)

    def send(self, tensor: Tensor) -> None:
        self._group.send([tensor.to(self.device)], self._peer, 0).wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the group may go as soon as this returns

    def receive(self, tensor: Tensor) -> None:
        self._group.recv([tensor], self._peer, 0).wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def send_object(self, what: object) -> None:
        text = torch.frombuffer(bytearray(json.dumps(what).encode()), dtype=torch.uint8)
        self.send(torch.tensor([text.numel()]))
        self.send(text)

    def receive_object(self) -> Any:
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.receive(size)
        text = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        self.receive(text)
        return json.loads(bytes(text.cpu().numpy()))
