"""Interface of a transport, which serves versions of the weights to readers on other machines."""

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
    """A version that is being fetched from its publisher."""

    tables: list[list[Piece]]
    """Table of each bucket."""
    digests: dict[str, str] | None
    """Digest of each tensor by name. None: the version was published without digests."""
    tensors: Iterator[tuple[str, Tensor]]
    """Names and tensors, received one bucket at a time. A bucket stays in memory as long as one of its tensors is
    referenced."""


class VersionServer(ABC):
    """Server of versions in the publisher's process."""

    address: tuple[str, int]
    """Address that readers connect to."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving after the transfers in progress have ended."""


class WeightTransport(ABC):
    """Transport that serves and fetches versions. A plug-in provides one as the `weight transport` "tcp"."""

    @abstractmethod
    def serve(
        self, host: str, token: str, find: Callable[[int], OpenVersion | None], timeout_seconds: float
    ) -> VersionServer:
        """Serve versions from background threads.

        Args:
            host: address to bind to, as the readers reach it.
            token: secret that readers must have.
            find: function that opens a version. It returns None if the version is gone.
            timeout_seconds: timeout of each bucket.
        """

    @abstractmethod
    def fetch(
        self, address: tuple[str, int], token: str, version: int, timeout_seconds: float, table_only: bool = False
    ) -> RemoteVersion:
        """Request a version from a server.

        Args:
            address: address of the server.
            token: token of the handle.
            version: number of the version.
            timeout_seconds: timeout of the response, and maximum time without data within a bucket.
            table_only: fetch names, dtypes, shapes and digests, without the weights.

        Raises:
            FileNotFoundError: the publisher no longer has the version.
            PermissionError: the address belongs to another publisher.
            ConnectionError: the connection was refused, or the server did not respond in time.
        """


def open_transport() -> WeightTransport:
    """Return the transport between machines.

    Raises:
        MissingPlugin: no plug-in provides one.
    """
    return load("weight transport", TRANSPORT, "placement.nodes > 1, weight transport")()
