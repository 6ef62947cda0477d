"""Weights from a trainer to the engines that generate, by the way that fits where the two live.

A version is one folder in shared memory, or on disk. It appears under its name only when it is whole, and readers map
it into memory, so that a version that is unlinked while it is read stays readable to that reader. Readers on other
machines pull it from the publisher (transport.py). Carriers of plug-ins may bring it while it is still being gathered
(carrier.py).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from components.registry import load
from components.weights.buckets import pieces_of
from components.weights.choice import FOLDER_CARRIER
from components.weights.digest import digest
from components.weights.folder import OpenVersion, VersionWriter, WrittenVersion, open_version, prove
from components.weights.transport import RemoteVersion, VersionServer, open_transport

_VERSION_GLOB = "weights-????????*"


@dataclass(frozen=True)
class WeightHandle:
    """Where one version of the weights lies. Small and picklable: this is what crosses processes."""

    version: int
    """Number of the version; 0 is what the engines loaded at their start."""
    path: str
    """Folder that holds the version, on the publisher's machine."""
    nbytes: int
    """Payload, in bytes."""
    token: str = field(default="", repr=False)
    """Marks the publisher's folder from one of the same name on another machine, and its readers from strangers."""
    address: tuple[str, int] | None = None
    """Where the publisher serves its versions to other machines; None: nowhere."""
    adapter_scale: float = 0.0
    """The version is low-rank adapters alone, by the names of peft's files, and B A is to be multiplied by this before
    it is added to the weights that were loaded. 0: it is whole weights."""
    carrier: str = FOLDER_CARRIER
    """Name of the carrier, whose class reads the version (carrier.py)."""
    is_sent: bool = False
    """The ranks send it as they gather it, and the version's own handle follows; `path` is then the run's folder on
    this machine."""
    route: Any = None
    """Where the carrier's readers find this version, if it `is_sent`, or those that follow; set by the carrier and
    picklable."""
    reader: int = 0
    """Of one that is sent: the number of the engine's first process among all readers, from 1."""
    probe: Any = None
    """Log-probabilities of the trainer with this version, with which an engine compares its own (plugins/engine_check).
    Picklable. None: nothing is checked."""


class WeightPublisher:
    """Writes versions and unlinks the older ones. One per run: the publisher owns its directory.

    The version before the newest stays until the next one is written: an engine that is replaced while the newest is
    on its way to all is given it first. So two versions take space, never more.
    """

    def __init__(
        self,
        directory: str | Path,
        fallback_directory: str | Path | None = None,
        bucket_bytes: int = 256 * 2**20,
        headroom_bytes: int = 16 * 2**20,
        *,
        serve: bool = False,
        host: str | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        """
        Args:
            directory: of this publisher alone, usually below /dev/shm; versions that a killed predecessor left are
                removed.
            fallback_directory: for versions that do not fit into `directory`; of this publisher alone.
            bucket_bytes: a reader on another machine gets so much at a time, or one weight that is larger.
            headroom_bytes: stay free in `directory`: a full /dev/shm kills other processes and raises no error.
            serve: listen for readers on other machines, on a free port of `host`, which must lie in a network that you
                trust (transport.py). Without it no socket is opened.
            host: this machine's address as the readers reach it; nothing is bound to any other. None: MASTER_ADDR, as
                rank 0 of a train role has it, else 127.0.0.1.
            timeout_seconds: a reader that takes no bucket for so long is given up.
        """
        self._directories = [Path(place) for place in (directory, fallback_directory) if place is not None]
        self._bucket_bytes = bucket_bytes
        self._headroom_bytes = headroom_bytes
        self._token = secrets.token_hex(16)
        self._published: list[tuple[WeightHandle, WrittenVersion]] = []
        self._newest: int | None = None
        self._sweep()
        host = host or os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._server: VersionServer | None = None
        if serve:
            self._server = open_transport().serve(host, self._token, self._find, timeout_seconds)

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        with_digests: bool = False,
        adapter_scale: float = 0.0,
    ) -> WeightHandle:
        """Write `tensors` as `version`; returns when it is whole.

        Args:
            version: newer than the last.
            tensors: each is copied before the next is asked for.
            with_digests: lay a digest of each tensor beside the version, for `read_digests`.
            adapter_scale: of the handle: above 0 where the tensors are adapters.

        Raises:
            ValueError: `version` is not newer than the last, or a name comes twice.
            OSError: no directory has space.
        """
        if self._newest is not None and version <= self._newest:
            raise ValueError(f"version {version} was published after version {self._newest}; versions must rise")
        digests: dict[str, str] | None = {} if with_digests else None
        written, nbytes = self._write(f"weights-{version:08d}", _digested(tensors, digests), digests)
        address = None if self._server is None else self._server.address
        handle = WeightHandle(version, str(written.folder), nbytes, self._token, address, adapter_scale)
        self._published.append((handle, written))
        self._newest = version
        return handle

    def _write(
        self, name: str, tensors: Iterable[tuple[str, Tensor]], digests: dict[str, str] | None
    ) -> tuple[WrittenVersion, int]:
        old = self._published.pop(0)[1] if len(self._published) > 1 else None
        writer = VersionWriter(self._directories, name, self._bucket_bytes, self._headroom_bytes, old)
        try:
            for weight, tensor in tensors:
                writer.write(weight, tensor)
            return writer.finish(prove(self._token, "folder"), digests), writer.nbytes
        except BaseException:
            writer.remove()
            raise

    def _find(self, version: int) -> OpenVersion | None:
        """Called by the server's threads."""
        paths = [handle.path for handle, _ in self._published if handle.version == version]
        return open_version(Path(paths[0]), prove(self._token, "folder"), writable=False) if paths else None

    def close(self) -> None:
        """Unlink everything; the publisher cannot be used afterwards."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for _, written in self._published:
            shutil.rmtree(written.folder, ignore_errors=True)
        self._published.clear()
        self._sweep()
        for place in self._directories:
            # Not ours to remove when something else lies in it.
            with contextlib.suppress(OSError):
                place.rmdir()

    def _sweep(self) -> None:
        for place in self._directories:
            for folder in place.glob(_VERSION_GLOB):
                shutil.rmtree(folder, ignore_errors=True)


def _digested(tensors: Iterable[tuple[str, Tensor]], digests: dict[str, str] | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if digests is not None:
            digests[name] = digest(tensor)
        yield name, tensor.detach()


def weight_shapes(handle: WeightHandle) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights of a version, read without their payload."""
    opened = _open(handle, table_only=True)
    tables = opened.tables if isinstance(opened, RemoteVersion) else [pieces for pieces, _ in opened.buckets]
    return {piece.name: piece.shape for piece in chain(*tables)}


def read_digests(handle: WeightHandle) -> dict[str, str]:
    """Digest of each weight of a version, as it was published.

    Raises:
        ValueError: it was published without.
    """
    digests = _open(handle, table_only=True).digests
    if digests is None:
        raise ValueError(f"version {handle.version} has no digests; publish it with_digests=True")
    return digests


def read_weights(
    handle: WeightHandle, timeout_seconds: float = 60.0, *, writable: bool = True, part: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a version, by the carrier that its handle names. Copy what you keep.

    Args:
        handle: of the version.
        timeout_seconds: for the publisher's response, and for each bucket through the network.
        writable: False: who writes into a tensor that is mapped ends this process. It is quicker: the mapping is used
            again for later versions.
        part: this process's number among those of its engine.

    Raises:
        FileNotFoundError: the version is gone, or was never within reach.
        ConnectionError: the publisher is gone, or does not respond in time.
    """
    if handle.carrier == FOLDER_CARRIER:
        yield from read_folder(handle, timeout_seconds, writable=writable)
        return
    carrier = load("weight carrier", handle.carrier, "rollout.weight_sync")
    yield from carrier.read(handle, timeout_seconds, writable=writable, part=part)


def read_folder(handle: WeightHandle, timeout_seconds: float, *, writable: bool) -> Iterator[tuple[str, Tensor]]:
    """The weights of a published version, mapped where its folder is, else through the network from a publisher that
    serves. See `read_weights`.
    """
    opened = _open(handle, False, timeout_seconds, writable)
    if isinstance(opened, RemoteVersion):
        yield from opened.tensors
        return
    for pieces, flat in opened.buckets:
        yield from pieces_of(flat, pieces)


@contextlib.contextmanager
def nearby(handle: WeightHandle, directory: Path, readers: int) -> Iterator[WeightHandle]:
    """The version on this machine, for readers that each want all of it, as the parts of one engine do: it comes
    through the network once.

    Args:
        handle: of the version; given back as it is for one reader, and when the version is on this machine.
        directory: of the caller alone, usually below /dev/shm; removed at the end.
        readers: how many.
    """
    opened = _open(handle, False) if readers > 1 else None
    if not isinstance(opened, RemoteVersion):
        yield handle
        return
    # A predecessor may have been killed in here.
    shutil.rmtree(directory, ignore_errors=True)
    writer = VersionWriter([directory], f"weights-{handle.version:08d}", bucket_bytes=2**28, headroom_bytes=2**24)
    try:
        for name, tensor in opened.tensors:
            writer.write(name, tensor)
        written = writer.finish(prove(handle.token, "folder"), opened.digests)
        yield replace(handle, path=str(written.folder), address=None)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _open(
    handle: WeightHandle, table_only: bool, timeout_seconds: float = 60.0, writable: bool = False
) -> OpenVersion | RemoteVersion:
    here = open_version(Path(handle.path), prove(handle.token, "folder"), writable=writable)
    if here is not None:
        return here
    if handle.address is None:
        raise FileNotFoundError(
            f"version {handle.version} of the weights is not at {handle.path}: it was unlinked after a newer "
            "one was published, or lies on another machine; receive the newest handle, or let the publisher serve"
        )
    return open_transport().fetch(handle.address, handle.token, handle.version, timeout_seconds, table_only)
