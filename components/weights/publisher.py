"""Publishing of weight versions by a trainer, and reading of them by rollout engines.

A version is a folder in shared memory or on disk. It gets its final name only when it is complete. Readers map it into
memory, so a version remains readable for them after it is unlinked. Readers on other machines fetch it from the
publisher (transport.py). Carriers of plug-ins may transfer a version while it is still being gathered (carrier.py).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from components.registry import load
from components.weights.buckets import pieces_of
from components.weights.choice import FOLDER_CARRIER
from components.weights.folder import OpenVersion, VersionWriter, WrittenVersion, open_version, prove
from components.weights.transport import RemoteVersion, VersionServer, open_transport
from components.weights.verification import TensorDigests, open_digests

_VERSION_GLOB = "weights-????????*"


@dataclass(frozen=True)
class WeightHandle:
    """Reference to one version of the weights. It is small and picklable, and is sent to other processes."""

    version: int
    """Number of the version. 0 denotes the weights that the engines loaded at start-up."""
    path: str
    """Path to the folder of the version on the publisher's machine."""
    nbytes: int
    """Size of the weights, in bytes."""
    token: str = field(default="", repr=False)
    """Secret of the publisher. It distinguishes the folder from one of the same name on another machine, and
    authenticates readers."""
    address: tuple[str, int] | None = None
    """Address at which the publisher serves its versions to other machines, or None."""
    adapter_scale: float = 0.0
    """Scale by which the product B A of low-rank adapters is multiplied before it is added to the loaded weights. The
    version then contains only adapters, by the names of peft's files. 0: the version contains the full weights."""
    carrier: str = FOLDER_CARRIER
    """Name of the carrier whose class reads the version (carrier.py)."""
    is_sent: bool = False
    """True if the ranks send the version while they gather it. Names, shapes and digests are in its folder once it was
    sent."""
    is_kept: bool = False
    """True if a version that `is_sent` is also written to its folder. Otherwise an engine that lacks it has to request
    it from the ranks."""
    fallback_path: str = ""
    """Path to the folder of the version if it does not fit at `path`."""
    route: Any = None
    """Address that the carrier's readers need for a version that `is_sent`. Set by the carrier; picklable."""
    reader: int = 0
    """Index of the engine's first process among all readers, from 1. Used only if the version `is_sent`."""
    parts: int = 1
    """Number of processes of the engine that receives the version."""
    resend: str = ""
    """Identifier of a second transfer of a version that `is_sent`, to one engine that lacks it. Empty: the transfer to
    all engines."""
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Time of rank 0 for each part of the publication, in seconds; see `SyncTimer.seconds`."""


class WeightPublisher:
    """Publisher that writes versions and unlinks old ones. There is one per run, and it owns its directory.

    The second newest version is kept until the next one is written, because an engine that is replaced while the newest
    is being transferred receives it first. At most two versions take space.
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
            directory: directory that only this publisher uses, usually below /dev/shm. Versions left by a killed
                predecessor are removed.
            fallback_directory: directory for versions that do not fit into `directory`. Only this publisher uses it.
            bucket_bytes: maximum size of a message to a reader on another machine. A larger weight is sent alone.
            headroom_bytes: number of bytes that remain free in `directory`. A full /dev/shm kills other processes
                without raising an error.
            serve: listen for readers on other machines, on a free port of `host`, which must be in a trusted network
                (transport.py). False: no socket is opened.
            host: address of this machine as the readers reach it, and the only one that is bound. None: MASTER_ADDR,
                which rank 0 of a train role has, else 127.0.0.1.
            timeout_seconds: maximum time for which a reader may take no bucket before its transfer is aborted.
        """
        self._directories = [Path(path) for path in (directory, fallback_directory) if path is not None]
        self._bucket_bytes = bucket_bytes
        self._headroom_bytes = headroom_bytes
        self._token = secrets.token_hex(16)
        self._published: list[tuple[WeightHandle, WrittenVersion]] = []
        self._newest: int | None = None
        self._writer = VersionWriter
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
        digests: TensorDigests | None = None,
    ) -> WeightHandle:
        """Write `tensors` as `version`, and return its handle once it is complete.

        Args:
            version: number of the version, which must be higher than the last one.
            tensors: names and tensors. Each tensor is copied before the next one is requested.
            with_digests: store a digest of each tensor with the version, for `read_digests`.
            adapter_scale: `adapter_scale` of the handle; above 0 if the tensors are adapters.
            digests: digests that the iterator `tensors` computes. Default: they are computed here, `with_digests`.

        Raises:
            ValueError: `version` is not higher than the last one, or a name occurs twice.
            OSError: no directory has enough space.
        """
        # Compared with the newest version ever published, because engines refuse versions older than their own.
        if self._newest is not None and version <= self._newest:
            raise ValueError(f"version {version} was published after version {self._newest}; versions must rise")
        if digests is None and with_digests:
            digests = open_digests()
            tensors = digested(tensors, digests)
        written, nbytes = self._write(self.folder_name(version), tensors, digests)
        address = None if self._server is None else self._server.address
        handle = WeightHandle(version, str(written.folder), nbytes, self._token, address, adapter_scale)
        self._published.append((handle, written))
        self._newest = version
        return handle

    @staticmethod
    def folder_name(version: int) -> str:
        """Return the name of the folder of a version."""
        return f"weights-{version:08d}"

    def _write(
        self, name: str, tensors: Iterable[tuple[str, Tensor]], digests: TensorDigests | None
    ) -> tuple[WrittenVersion, int]:
        old = self._published.pop(0)[1] if len(self._published) > 1 else None
        writer = self._writer(self._directories, name, self._bucket_bytes, self._headroom_bytes, old)
        try:
            for weight, tensor in tensors:
                writer.write(weight, tensor.detach())
            made = None if digests is None else digests.result()
            return writer.finish(prove(self._token, "folder"), made), writer.nbytes
        except BaseException:
            # An incomplete folder would take space in shared memory until the end of the run.
            writer.remove()
            raise

    def _find(self, version: int) -> OpenVersion | None:
        """Open a version for the server, whose threads call this. Return None if it is gone."""
        paths = [handle.path for handle, _ in self._published if handle.version == version]
        return open_version(Path(paths[0]), prove(self._token, "folder"), writable=False) if paths else None

    def close(self) -> None:
        """Stop serving and unlink all versions. The publisher cannot be used afterwards."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for _, written in self._published:
            shutil.rmtree(written.folder, ignore_errors=True)
        self._published.clear()
        self._sweep()
        for directory in self._directories:
            # rmdir fails if the directory holds files of somebody else, which must not be deleted.
            with contextlib.suppress(OSError):
                directory.rmdir()

    def _sweep(self) -> None:
        for directory in self._directories:
            for folder in directory.glob(_VERSION_GLOB):
                shutil.rmtree(folder, ignore_errors=True)


def digested(tensors: Iterable[tuple[str, Tensor]], digests: TensorDigests) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, and add each of them to the digests."""
    for name, tensor in tensors:
        digests.add(name, tensor)
        yield name, tensor


def weight_shapes(handle: WeightHandle) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a version by name. The weights themselves are not read."""
    opened = open_handle(handle, table_only=True)
    tables = opened.tables if isinstance(opened, RemoteVersion) else [pieces for pieces, _ in opened.buckets]
    return {piece.name: piece.shape for piece in chain(*tables)}


def read_digests(handle: WeightHandle) -> dict[str, str]:
    """Return the digest of each weight of a version by name, as computed by the publisher.

    Raises:
        ValueError: the version was published without digests.
    """
    digests = open_handle(handle, table_only=True).digests
    if digests is None:
        raise ValueError(f"version {handle.version} has no digests; publish it with_digests=True")
    return digests


def read_weights(
    handle: WeightHandle, timeout_seconds: float = 60.0, *, writable: bool = True, part: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each weight of a version, read by the carrier that the handle names.

    A tensor is valid until the next one is requested; copy it to keep it.

    Args:
        handle: handle of the version.
        timeout_seconds: timeout of the publisher's response, and of each bucket over the network.
        writable: allow writing to the tensors. With False, writing to a mapped tensor kills this process; reading is
            faster, because the mapping is reused for later versions.
        part: index of this process among the processes of its engine.

    Raises:
        FileNotFoundError: the version has been unlinked, or cannot be reached from this machine.
        ConnectionError: the publisher is gone, or does not respond in time.
    """
    if handle.carrier == FOLDER_CARRIER:
        yield from read_folder(handle, timeout_seconds, writable=writable)
        return
    carrier = load("weight carrier", handle.carrier, "rollout.weight_sync")
    yield from carrier.read(handle, timeout_seconds, writable=writable, part=part)


def read_folder(handle: WeightHandle, timeout_seconds: float, *, writable: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a published version. They are mapped into memory if the folder is on this machine, and
    fetched from the publisher over the network otherwise. See `read_weights`.
    """
    opened = open_handle(handle, False, timeout_seconds, writable)
    if isinstance(opened, RemoteVersion):
        yield from opened.tensors
        return
    for pieces, flat in opened.buckets:
        yield from pieces_of(flat, pieces)


def open_handle(
    handle: WeightHandle, table_only: bool, timeout_seconds: float = 60.0, writable: bool = False
) -> OpenVersion | RemoteVersion:
    """Open a version on this machine, or fetch it from its publisher.

    Args:
        handle: handle of the version.
        table_only: fetch names, dtypes, shapes and digests without the weights.
        timeout_seconds: timeout of the publisher's response.
        writable: map the version so that its tensors can be written to.

    Raises:
        FileNotFoundError: the version has been unlinked, or cannot be reached from this machine.
    """
    for path in filter(None, (handle.path, handle.fallback_path)):
        # The proof of the token rejects a folder of the same path that another run or machine has written.
        local_version = open_version(Path(path), prove(handle.token, "folder"), writable=writable)
        if local_version is not None:
            return local_version
    if handle.address is None:
        raise FileNotFoundError(
            f"version {handle.version} of the weights is not at {handle.path}: it was unlinked after a newer "
            "one was published, or lies on another machine; receive the newest handle, or let the publisher serve"
        )
    return open_transport().fetch(handle.address, handle.token, handle.version, timeout_seconds, table_only)
