"""Contract of a transport: it serves versions of the weights to readers on other machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from components.registry import load
from components.weights.buckets import Piece
from components.weights.choice import TRANSPORT
from components.weights.folder import OpenVersion


@dataclass(frozen=True)
class RemoteVersion:
    """A version at the publisher's, with its payload on the way."""

    tables: list[list[Piece]]
    digests: dict[str, str] | None
    tensors: Iterator[tuple[str, Tensor]]
    """One bucket at a time is held here, and longer by who keeps its tensors."""


class VersionServer(ABC):
    """A server in the publisher's process."""

    address: tuple[str, int]
    """Address that readers connect to."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving, once the transfers that have begun have ended."""


class WeightTransport(ABC):
    """Serves versions, and fetches them. A plug-in provides one as the `weight transport` "tcp"."""

    @abstractmethod
    def serve(
        self, host: str, token: str, find: Callable[[int], OpenVersion | None], timeout_seconds: float
    ) -> VersionServer:
        """Serve versions from side threads.

        Args:
            host: address to bind to, as the readers reach it.
            token: secret that readers must have.
            find: opens a version; returns None if it is gone.
            timeout_seconds: for every single bucket.
        """

    @abstractmethod
    def fetch(
        self, address: tuple[str, int], token: str, version: int, timeout_seconds: float, table_only: bool = False
    ) -> RemoteVersion:
        """Request a version from a server.

        Args:
            address: of the server.
            token: of the handle.
            version: number of the version.
            timeout_seconds: for the answer, and while nothing of a bucket comes.
            table_only: fetch names, dtypes, shapes and digests, without the payload.

        Raises:
            FileNotFoundError: the publisher has it no more.
            PermissionError: the publisher at the address is another one.
            ConnectionError: nobody is there, or no answer came in time.
        """


def open_transport() -> WeightTransport:
    """Return the transport.

    Raises:
        MissingPlugin: no plug-in provides one.
    """
    return load("weight transport", TRANSPORT, "placement.nodes > 1, weight transport")()
