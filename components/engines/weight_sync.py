"""Weights from a trainer to the engines that generate: files in shared memory, or on disk.

A version is one folder of safetensors files. It appears under its name only when it is whole, and readers map
it into memory, so that a version that is unlinked while it is read stays readable to that reader.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_VERSION_GLOB = "weights-????????*"


@dataclass(frozen=True)
class WeightHandle:
    """Where one version of the weights lies. Small and picklable: this is what crosses processes."""

    version: int
    """Number of the version; 0 is what the engines loaded at their start."""
    path: str
    """Folder that holds the version."""
    nbytes: int
    """Payload, in bytes."""


class WeightPublisher:
    """Writes versions and unlinks the older ones. One per run: the publisher owns its directory.

    The version before the newest stays until the next one is written: an engine that is replaced while the newest is
    on its way to all is given it first. So two versions take room, never more.
    """

    def __init__(
        self,
        directory: str | Path,
        fallback_directory: str | Path | None = None,
        bucket_bytes: int = 256 * 2**20,
        headroom_bytes: int = 16 * 2**20,
    ) -> None:
        """
        Args:
            directory: of this publisher alone, usually below /dev/shm; versions that a killed predecessor left are
                removed.
            fallback_directory: for versions that do not fit into `directory`; of this publisher alone.
            bucket_bytes: weights are collected up to this size before they are written.
            headroom_bytes: stay free in `directory`: a full /dev/shm kills other processes and raises no error.
        """
        self._directories = [Path(place) for place in (directory, fallback_directory) if place is not None]
        self._bucket_bytes = bucket_bytes
        self._headroom_bytes = headroom_bytes
        self._published: list[WeightHandle] = []
        self._sweep()

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> WeightHandle:
        """Write `tensors` as `version`; returns when it is whole.

        Raises:
            ValueError: `version` is not newer than the last, or a name comes twice.
            OSError: no directory has room.
        """
        if self._published and version <= self._published[-1].version:
            raise ValueError(
                f"version {version} was published after version {self._published[-1].version}; versions must rise"
            )
        for older in self._published[:-1]:
            shutil.rmtree(older.path, ignore_errors=True)
        del self._published[:-1]
        aside = _Aside(self._directories, f"weights-{version:08d}", self._headroom_bytes)
        try:
            for bucket in _buckets(tensors, self._bucket_bytes):
                aside.write(bucket)
            path = aside.rename()
        except BaseException:
            aside.remove()
            raise
        handle = WeightHandle(version=version, path=str(path), nbytes=aside.nbytes)
        self._published.append(handle)
        return handle

    def close(self) -> None:
        """Unlink everything; the publisher cannot be used afterwards."""
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


class _Aside:
    """A version in the making, in the first directory that has room for all of it."""

    def __init__(self, directories: list[Path], name: str, headroom_bytes: int) -> None:
        self._candidates = list(directories)
        self._name = name
        self._headroom_bytes = headroom_bytes
        self._folder = self._start()
        self._names: set[str] = set()
        self._files = 0
        self.nbytes = 0

    def _start(self) -> Path:
        folder = self._candidates[0] / f"{self._name}.partial"
        folder.mkdir(parents=True)
        return folder

    def write(self, bucket: dict[str, Tensor]) -> None:
        repeated = self._names & bucket.keys()
        if repeated:
            raise ValueError(f"weights {sorted(repeated)} came twice in {self._name}; names must be unique")
        nbytes = sum(tensor.nbytes for tensor in bucket.values())
        while shutil.disk_usage(self._folder).free < nbytes + self._headroom_bytes:
            self._move_on(nbytes)
        save_file(bucket, self._folder / f"{self._files:05d}.safetensors")
        self._files += 1
        self._names |= bucket.keys()
        self.nbytes += nbytes

    def _move_on(self, nbytes: int) -> None:
        full = self._folder
        if len(self._candidates) == 1:
            raise OSError(
                f"no room for the weights: {full.parent} has {shutil.disk_usage(full).free:,} bytes free, "
                f"{nbytes:,} more are needed after {self.nbytes:,} written; give the publisher a "
                "fallback_directory on a larger disk, or enlarge the shared memory (docker: --shm-size)"
            )
        self._candidates.pop(0)
        self._folder = self._start()
        for file in sorted(full.iterdir()):
            shutil.move(file, self._folder / file.name)
        shutil.rmtree(full)

    def rename(self) -> Path:
        return self._folder.rename(self._folder.with_name(self._name))

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    bucket: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors:
        if name in bucket:
            raise ValueError(f"weight {name!r} was published twice; names must be unique")
        if bucket and filled + tensor.nbytes > max_bytes:
            yield bucket
            bucket, filled = {}, 0
        bucket[name] = tensor.detach().cpu().contiguous()
        filled += tensor.nbytes
    if bucket:
        yield bucket


def _files(handle: WeightHandle) -> list[Path]:
    files = sorted(Path(handle.path).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"version {handle.version} of the weights is not at {handle.path}: it was unlinked after a newer "
            "one was published, or lies on another machine; receive the newest handle"
        )
    return files


def weight_shapes(handle: WeightHandle) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights of a version, read without their payload."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(handle):
        with safe_open(file, framework="pt") as weights:
            shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    return shapes


def read_weights(handle: WeightHandle) -> Iterator[tuple[str, Tensor]]:
    """The weights of a version, mapped from its files: copy what you keep, and do not write."""
    with contextlib.ExitStack() as stack:
        # All are opened at once: the version may be unlinked while it is read.
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in _files(handle)]
        for file in files:
            for name in file.keys():  # noqa: SIM118 (no mapping: safe_open has no iterator)
                yield name, file.get_tensor(name)
