"""A version of the weights in a folder: one file with all buckets, and an index of the tensors in it.

Readers map the file into memory. They hold a shared lock on it as long as any tensor from it is referenced. The
publisher reuses the file of an old version that no reader has locked, because allocating new shared memory takes longer
than the copy. A locked file is unlinked instead, and remains readable for its readers. A reader that maps the file
read-only keeps its mapping (without the lock) for the next version in that file, for the same reason.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import mmap
import os
import shutil
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from components.models.disk.tensor_file import write_at
from components.process.heartbeat import beat
from components.weights.buckets import ALIGNMENT, Piece, pieces_of

_WEIGHTS, _INDEX = "weights.bin", "index.json"
_kept: dict[tuple[int, int], _Mapping] = {}
"""Read-only mappings of this process, by device and inode. A publisher alternates between two files."""


@dataclass(frozen=True)
class _Mapping:
    """A read-only mapping of a whole file."""

    file: int
    whole: mmap.mmap


@dataclass(frozen=True)
class OpenVersion:
    """An open version, which remains readable after it is unlinked."""

    buckets: list[tuple[list[Piece], Tensor]]
    """Table and content ([bytes] uint8) of each bucket."""
    digests: dict[str, str] | None
    """Digest of each tensor by name. None: the version was published without digests."""


@dataclass
class _Bucket:
    """Table of a bucket, which starts at a page of the file. It is sent to other machines as one message."""

    start: int
    nbytes: int = 0
    """Size in bytes, alignment gaps included."""
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class WrittenVersion:
    """Record of a written version that the publisher keeps."""

    folder: Path
    mapped: Tensor | None = None
    """Writable mapping of the whole file, or None if the file was not written through a mapping."""


class VersionWriter:
    """Writer of one version, in the first directory that has enough space for all of it."""

    def __init__(
        self,
        directories: list[Path],
        name: str,
        bucket_bytes: int,
        headroom_bytes: int,
        old: WrittenVersion | None = None,
    ) -> None:
        """
        Args:
            directories: candidate directories, tried in this order.
            name: name of the folder once it is complete.
            bucket_bytes: maximum size of a bucket. A larger tensor gets a bucket of its own.
            headroom_bytes: number of bytes that must remain free in the directory.
            old: version to discard. Its file is reused if no reader has locked it.
        """
        self._candidates = list(directories)
        self._name = name
        self._bucket_bytes = bucket_bytes
        self._headroom_bytes = headroom_bytes
        self._mapped: Tensor | None = None
        self._names: set[str] = set()
        self._buckets = [_Bucket(0)]
        self.nbytes = 0
        # Reusing the file of an old version saves the allocation of new pages.
        if old is None or not self._recycle(old):
            self._start()

    def _recycle(self, old: WrittenVersion) -> bool:
        if old.folder.parent != self._candidates[0] or not (old.folder / _WEIGHTS).exists():
            shutil.rmtree(old.folder, ignore_errors=True)
            return False
        # Renaming before locking avoids a race: a reader that opens the path later does not find it, and a reader that
        # opened it earlier holds the lock.
        self._folder = old.folder.rename(self._candidates[0] / f"{self._name}.partial")
        self._file = os.open(self._folder / _WEIGHTS, os.O_RDWR)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.remove()
            return False
        # Without an index nobody can open the folder while its file is overwritten.
        (self._folder / _INDEX).unlink()
        size = os.fstat(self._file).st_size
        self._mapped = old.mapped
        if size and (self._mapped is None or len(self._mapped) != size):
            self._mapped = torch.from_file(str(self._folder / _WEIGHTS), shared=True, size=size, dtype=torch.uint8)
        return True

    def _start(self) -> None:
        self._folder = self._candidates[0] / f"{self._name}.partial"
        self._folder.mkdir(parents=True)
        self._file = os.open(self._folder / _WEIGHTS, os.O_RDWR | os.O_CREAT)

    def write(self, name: str, tensor: Tensor) -> None:
        """Append a tensor to the version.

        Raises:
            ValueError: a tensor of this name was written before.
            OSError: no directory has enough space.
        """
        if name in self._names:
            raise ValueError(f"weight {name!r} came twice; names must be unique")
        self._names.add(name)
        bucket = self._buckets[-1]
        if bucket.pieces and bucket.nbytes + tensor.nbytes > self._bucket_bytes:
            bucket = _Bucket(self._end)
            self._buckets.append(bucket)
        offset = -(-bucket.nbytes // ALIGNMENT) * ALIGNMENT
        dtype = str(tensor.dtype).removeprefix("torch.")
        piece = Piece(name, dtype, tuple(tensor.shape), offset)
        bucket.pieces.append(piece)
        bucket.nbytes = offset + tensor.nbytes
        self._copy(tensor, piece, bucket.start)
        self.nbytes += tensor.nbytes
        beat()

    @property
    def _end(self) -> int:
        """End of the used part of the file in bytes, rounded up to whole pages."""
        last = self._buckets[-1]
        return last.start + -(-last.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def _copy(self, tensor: Tensor, piece: Piece, start: int) -> None:
        end = self._end
        while (more := end - os.fstat(self._file).st_size) > 0 and self._lacks(more):
            self._move_on(more, start + piece.offset)
        if self._mapped is not None and end <= len(self._mapped):
            ((_, target),) = pieces_of(self._mapped[start:], [piece])
            target.copy_(tensor)
            return
        # Without a mapping, because a full disk raises an OSError here but kills the process (SIGBUS) in a mapping.
        write_at(self._file, tensor.cpu(), start + piece.offset)
        os.truncate(self._file, max(end, os.fstat(self._file).st_size))

    def _lacks(self, nbytes: int) -> bool:
        return shutil.disk_usage(self._folder).free < nbytes + self._headroom_bytes

    def _move_on(self, nbytes: int, written: int) -> None:
        full = self._folder
        if len(self._candidates) == 1:
            raise OSError(
                f"no space for the weights: {full.parent} has {shutil.disk_usage(full).free:,} bytes free, "
                f"{nbytes:,} more are needed after {self.nbytes:,} written; give the publisher a "
                "fallback_directory on a larger disk, or enlarge the shared memory (docker: --shm-size)"
            )
        self._candidates.pop(0)
        os.truncate(self._file, written)
        os.close(self._file)
        self._mapped = None
        self._start()
        # Tensors that were written before the directory was full are moved to the next one.
        shutil.copyfile(full / _WEIGHTS, self._folder / _WEIGHTS)
        shutil.rmtree(full)

    def finish(self, proof: str, digests: dict[str, str] | None) -> WrittenVersion:
        """Write the index and rename the complete folder to its final name.

        Args:
            proof: proof that readers compare with theirs, from `prove`.
            digests: digest of each tensor by name, or None.
        """
        if os.fstat(self._file).st_size > self._end:
            os.truncate(self._file, self._end)
            self._mapped = None
        os.close(self._file)
        buckets = [vars(bucket) for bucket in self._buckets]
        index = {"proof": proof, "digests": digests, "buckets": buckets}
        (self._folder / _INDEX).write_text(json.dumps(index))
        return WrittenVersion(self._folder.rename(self._folder.with_name(self._name)), self._mapped)

    def remove(self) -> None:
        os.close(self._file)
        shutil.rmtree(self._folder, ignore_errors=True)


def prove(token: str, what: str) -> str:
    """Return a proof of possession of the token (an HMAC of `what`) that does not reveal the token."""
    return hmac.digest(token.encode(), what.encode(), hashlib.sha256).hex()


def open_version(folder: Path, proof: str, *, writable: bool) -> OpenVersion | None:
    """Open the version in a folder. Return None if it does not exist or belongs to another publisher.

    Args:
        folder: path to the version.
        proof: proof that its publisher has written into the index.
        writable: map copy-on-write, so that tensors can be written to without changing the file. False: the tensors
            must not be written to, and the mapping is reused, which is faster from the second version on.
    """
    try:
        whole = _open(folder / _WEIGHTS, writable)
        index = json.loads((folder / _INDEX).read_text())
    except FileNotFoundError:
        return None
    if whole is None or index["proof"] != proof:
        return None
    opened = []
    for bucket in index["buckets"]:
        pieces = [Piece.from_json(piece) for piece in bucket["pieces"]]
        opened.append((pieces, whole[bucket["start"] : bucket["start"] + bucket["nbytes"]]))
    return OpenVersion(opened, index["digests"])


def _open(path: Path, writable: bool) -> Tensor | None:
    """Lock and map a file. Return [bytes] uint8, or None if the publisher has discarded the file meanwhile.

    The lock is held as long as the tensor is referenced.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        status = os.fstat(file)
        # Another inode: the publisher has replaced the file between opening and locking.
        is_same = status.st_ino == path.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        os.close(file)
        return None
    if not is_same or not status.st_size:
        os.close(file)
        return torch.empty(0, dtype=torch.uint8) if is_same else None
    whole = mmap.mmap(file, 0, access=mmap.ACCESS_COPY) if writable else _mapping(path, status)
    view = memoryview(whole)
    # Closing the file releases the lock, and tensors keep the view alive. A copy-on-write mapping keeps the lock
    # itself, because mmap duplicates the file descriptor.
    weakref.finalize(view, os.close, file)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(view, dtype=torch.uint8)


def _mapping(path: Path, status: os.stat_result) -> mmap.mmap:
    """Return a read-only mapping of a file that this process has locked: the cached one, or a new one."""
    # A mapping of an unlinked file would keep its memory allocated, and one of another size does not cover the file.
    for key, kept in list(_kept.items()):
        now = os.fstat(kept.file)
        if not now.st_nlink or now.st_size != len(kept.whole):
            del _kept[key]
            os.close(kept.file)
    inode = status.st_dev, status.st_ino
    if inode not in _kept:
        # A second descriptor: the cached mapping must not hold the lock, or the publisher could never reuse the file.
        file = os.open(path, os.O_RDONLY)
        _kept[inode] = _Mapping(file, mmap.mmap(file, 0, access=mmap.ACCESS_READ))
    return _kept[inode].whole
