"""One version of the weights as a folder: all buckets in one file, and an index that says what lies where.

Readers map the file, and hold a shared lock on it as long as anything they got from it lives. The publisher writes a
later version into the file of one that nobody holds, since fresh memory costs more than the copy; a file that is held
is unlinked instead, and stays as it is to those who have it.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from components.engines.tensor_file import write_at
from components.engines.weight_buckets import Bucket, Piece, pieces_of

_WEIGHTS, _INDEX = "weights.bin", "index.json"


@dataclass(frozen=True)
class OpenVersion:
    """A version that stays readable, even when it is unlinked."""

    buckets: list[tuple[list[Piece], Tensor]]
    """What lies in each flat buffer of bytes, and the buffer."""
    digests: dict[str, str] | None
    """Of each tensor, where the publisher was asked for them."""


@dataclass
class WrittenVersion:
    """What the publisher keeps of a version."""

    folder: Path
    mapped: Tensor | None = None
    """The whole file, where it was written through a mapping."""


class VersionWriter:
    """A version in the making, in the first directory that has room for all of it."""

    def __init__(self, directories: list[Path], name: str, headroom_bytes: int, old: WrittenVersion | None) -> None:
        """
        Args:
            directories: to be tried in this order.
            name: of the folder, once it is whole.
            headroom_bytes: must stay free.
            old: a version that is given up; its memory is used again when nobody holds it.
        """
        self._candidates = list(directories)
        self._name = name
        self._headroom_bytes = headroom_bytes
        self._mapped: Tensor | None = None
        self._table: list[dict[str, object]] = []
        self._end = 0
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

    def write(self, bucket: Bucket) -> None:
        end = self._end + -(-bucket.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        while (more := end - os.fstat(self._file).st_size) > 0 and self._lacks(more):
            self._move_on(more)
        if self._mapped is not None and end <= len(self._mapped):
            place = self._mapped[self._end : end]
            for (_, target), tensor in zip(pieces_of(place, bucket.pieces), bucket.tensors, strict=True):
                target.copy_(tensor)
        else:
            # Not through a mapping: a full disk is an OSError here, and the end of the process there.
            for piece, tensor in zip(bucket.pieces, bucket.tensors, strict=True):
                write_at(self._file, tensor, self._end + piece.offset)
            os.truncate(self._file, max(end, os.fstat(self._file).st_size))
        self._table.append({"start": self._end, "nbytes": bucket.nbytes, "pieces": bucket.pieces})
        self._end = end
        self.nbytes += sum(tensor.nbytes for tensor in bucket.tensors)

    def _lacks(self, nbytes: int) -> bool:
        return shutil.disk_usage(self._folder).free < nbytes + self._headroom_bytes

    def _move_on(self, nbytes: int) -> None:
        full = self._folder
        if len(self._candidates) == 1:
            raise OSError(
                f"no space for the weights: {full.parent} has {shutil.disk_usage(full).free:,} bytes free, "
                f"{nbytes:,} more are needed after {self.nbytes:,} written; give the publisher a "
                "fallback_directory on a larger disk, or enlarge the shared memory (docker: --shm-size)"
            )
        self._candidates.pop(0)
        os.truncate(self._file, self._end)
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
        index = {"proof": proof, "digests": digests, "buckets": self._table}
        (self._folder / _INDEX).write_text(json.dumps(index))
        return WrittenVersion(self._folder.rename(self._folder.with_name(self._name)), self._mapped)

    def remove(self) -> None:
        os.close(self._file)
        shutil.rmtree(self._folder, ignore_errors=True)


def open_version(folder: Path, proof: str) -> OpenVersion | None:
    """None: it is not there, or is another publisher's."""
    try:
        whole = _map(folder / _WEIGHTS)
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


def _map(path: Path) -> Tensor | None:
    """[bytes] uint8; a copy of its own for who writes. None: the file was given up meanwhile."""
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        found = os.fstat(file)
        if found.st_ino != path.stat().st_ino:
            return None
        if not found.st_size:
            return torch.empty(0, dtype=torch.uint8)
        # The mapping has a duplicate of the file, and by that the lock; tensors keep the mapping alive.
        return torch.frombuffer(mmap.mmap(file, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    except BlockingIOError:
        return None
    finally:
        os.close(file)
