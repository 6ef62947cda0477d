"""One version of the weights as a folder: all buckets in one file, and an index that says what lies where.

Readers map the file, and hold a shared lock on it as long as anything they got from it lives. The publisher writes a
later version into the file of one that nobody holds, since fresh memory costs more than the copy; a file that is held
is unlinked instead, and stays as it is to those who have it. For the same reason a reader that writes nothing keeps its
mapping, without the lock, for the next version in that file.
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
"""Of this process, by device and inode: a publisher has two files in turn."""


@dataclass(frozen=True)
class _Mapping:
    """A whole file that cannot be written through it."""

    file: int
    whole: mmap.mmap


@dataclass(frozen=True)
class OpenVersion:
    """A version that stays readable, even when it is unlinked."""

    buckets: list[tuple[list[Piece], Tensor]]
    """What lies in each flat buffer of bytes, and the buffer."""
    digests: dict[str, str] | None
    """Of each tensor, where the publisher was asked for them."""


@dataclass
class _Bucket:
    """What lies where after a page's start; a reader on another machine gets it in one piece."""

    start: int
    nbytes: int = 0
    """Gaps of the alignment included."""
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class WrittenVersion:
    """What the publisher keeps of a version."""

    folder: Path
    mapped: Tensor | None = None
    """The whole file, where it was written through a mapping."""


class VersionWriter:
    """A version in the making, in the first directory that has room for all of it."""

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
            directories: to be tried in this order.
            name: of the folder, once it is whole.
            bucket_bytes: of tensors that lie together; a larger one stands alone.
            headroom_bytes: must stay free.
            old: a version that is given up; its memory is used again when nobody holds it.
        """
        self._candidates = list(directories)
        self._name = name
        self._bucket_bytes = bucket_bytes
        self._headroom_bytes = headroom_bytes
        self._mapped: Tensor | None = None
        self._names: set[str] = set()
        self._buckets = [_Bucket(0)]
        self.nbytes = 0
        if old is None or not self._recycle(old):
            self._start()

    def _recycle(self, old: WrittenVersion) -> bool:
        if old.folder.parent != self._candidates[0] or not (old.folder / _WEIGHTS).exists():
            shutil.rmtree(old.folder, ignore_errors=True)
            return False
        # Renamed before it is locked: who looks it up after that misses it, who looked it up before holds the lock.
        self._folder = old.folder.rename(self._candidates[0] / f"{self._name}.partial")
        self._file = os.open(self._folder / _WEIGHTS, os.O_RDWR)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.remove()
            return False
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
        """Copy a tensor behind those that were written.

        Raises:
            ValueError: the name comes a second time.
            OSError: no directory has room.
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
        """Of the file, as far as it is used: whole pages."""
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
        # Not through a mapping: a full disk is an OSError here, and the end of the process there.
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
        shutil.copyfile(full / _WEIGHTS, self._folder / _WEIGHTS)
        shutil.rmtree(full)

    def finish(self, proof: str, digests: dict[str, str] | None) -> WrittenVersion:
        """Let it appear under its name, whole."""
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
    """Return a proof that one has the token, without showing the token."""
    return hmac.digest(token.encode(), what.encode(), hashlib.sha256).hex()


def open_version(folder: Path, proof: str, *, writable: bool) -> OpenVersion | None:
    """None: it is not there, or is another publisher's.

    Args:
        folder: of the version.
        proof: that its publisher has left there.
        writable: who writes into the tensors writes into a copy of their own; else they must not be written to, which
            is quicker from the second version on.
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
        pieces = [Piece.of(piece) for piece in bucket["pieces"]]
        opened.append((pieces, whole[bucket["start"] : bucket["start"] + bucket["nbytes"]]))
    return OpenVersion(opened, index["digests"])


def _open(path: Path, writable: bool) -> Tensor | None:
    """[bytes] uint8, which has the lock. None: the file was given up meanwhile."""
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        found = os.fstat(file)
        is_same = found.st_ino == path.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        os.close(file)
        return None
    if not is_same or not found.st_size:
        os.close(file)
        return torch.empty(0, dtype=torch.uint8) if is_same else None
    whole = mmap.mmap(file, 0, access=mmap.ACCESS_COPY) if writable else _mapping(path, found)
    view = memoryview(whole)
    # Tensors keep the view alive. (What is mapped writable has a duplicate of the file, and so the lock, itself.)
    weakref.finalize(view, os.close, file)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(view, dtype=torch.uint8)


def _mapping(path: Path, found: os.stat_result) -> mmap.mmap:
    """Of a file that this process has locked; the one it has, or a new one."""
    for key, kept in list(_kept.items()):
        now = os.fstat(kept.file)
        if not now.st_nlink or now.st_size != len(kept.whole):
            del _kept[key]
            os.close(kept.file)
    own = found.st_dev, found.st_ino
    if own not in _kept:
        file = os.open(path, os.O_RDONLY)  # not the one with the lock
        _kept[own] = _Mapping(file, mmap.mmap(file, 0, access=mmap.ACCESS_READ))
    return _kept[own].whole
