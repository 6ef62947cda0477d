"""The two ends of a channel, and the transfer of bytes between them over TCP."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass

import psutil

from components.net.listening import listen_at

ADVICE = (
    "open the ports between the machines in the firewall, or set placement.interface to the network that all of them "
    "share"
)
_CHUNK = 2**20
_RETRY_S = 0.2


@dataclass(frozen=True)
class End:
    """One end of a channel."""

    name: str
    """Worker, such as `ACTOR-0`."""
    host: str
    ip: str
    interface: str
    node: str = ""
    """Ray's id of the machine."""

    def __str__(self) -> str:
        return f"{self.name} ({self.host}, {self.ip} on {self.interface})"


def end_here(name: str, ip: str, node: str = "") -> End:
    """Return this process as the end of a channel."""
    return End(name, socket.gethostname(), ip, interface_of(ip), node)


def interface_of(ip: str) -> str:
    """Return the network interface of this machine that has an address."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if ip in [e.address for e in entries]), "an unknown interface")


def own_ip(remote: tuple[str, int]) -> str:
    """Return the address of this machine from which packets are sent to a remote address. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(*remote, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


class BrokenChannel(ConnectionError):
    """Raised if two processes of the job cannot use a channel. The message names both of them."""


def broken(channel: str, one: End | str, other: End | str, why: str) -> BrokenChannel:
    """Return the error about a channel from one end to the other.

    Args:
        channel: channel, such as `rendezvous of ACTOR`.
        one: end that has found the fault.
        other: the other end, with its address and port.
        why: error.
    """
    return BrokenChannel(f"handshake, {channel}: {one} cannot reach {other}: {why}; {ADVICE}")


def reach(address: tuple[str, int], limit: float, wait_s: float) -> str:
    """Connect to a server once. Return an error, or an empty string.

    Args:
        address: host and port.
        limit: seconds for a connection. A firewall that drops packets exceeds it.
        wait_s: seconds until which the server may be starting, so that connections to it are refused.
    """
    until = time.monotonic() + wait_s
    while True:
        try:
            socket.create_connection(address, limit).close()
            return ""
        except ConnectionRefusedError as error:
            if time.monotonic() > until:
                return f"{error.strerror}, for {wait_s:g} s"
        except OSError as error:
            return reason(error, limit)
        time.sleep(_RETRY_S)


def reason(error: OSError, limit: float) -> str:
    """Return the reason of a failed connection."""
    if isinstance(error, TimeoutError):
        return f"no response within {limit:g} s"
    return error.strerror or str(error)


def serve(host: str, nbytes: int, count: int, limit: float) -> tuple[str, int]:
    """Send bytes to the given number of readers, in a thread. Return the address at which they connect.

    Args:
        host: address to listen on.
        nbytes: number of bytes for each reader.
        count: number of readers.
        limit: seconds until which they have to connect.
    """
    listening = listen_at(host)
    # Longer than that of the readers, which report the fault.
    listening.settimeout(2 * limit)
    threading.Thread(target=_send, args=(listening, nbytes, count), name="troupe-handshake", daemon=True).start()
    address, port = listening.getsockname()[:2]
    return address, port


def _send(listening: socket.socket, nbytes: int, count: int) -> None:
    with listening:
        for _ in range(count):
            try:
                connection, _ = listening.accept()
                with connection:
                    for begin in range(0, nbytes, _CHUNK):
                        connection.sendall(bytes(min(_CHUNK, nbytes - begin)))
            except OSError:
                # The reader reports the fault, with the name of this process.
                return


def fetch(address: tuple[str, int], nbytes: int, limit: float) -> str:
    """Read the bytes that `serve` sends. Return an error, or an empty string."""
    # A limit for all bytes together: a slow trickle would pass a limit for each read.
    until = time.monotonic() + limit
    received = 0
    try:
        with socket.create_connection(address, limit) as connection:
            while received < nbytes:
                connection.settimeout(max(0.01, until - time.monotonic()))
                part = len(connection.recv(_CHUNK))
                if not part:
                    return f"the connection ended after {received:,} of {nbytes:,} bytes"
                received += part
    except OSError as error:
        begun = f" ({received:,} of {nbytes:,} bytes arrived)" if received else ""
        return f"{reason(error, limit)}{begun}"
    return ""
