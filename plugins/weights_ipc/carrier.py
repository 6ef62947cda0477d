"""Weights from a rank to the engines on its own device, past the host: both map the memory of one bucket.

The rank fills it, each engine takes a copy and says so, and the rank fills it again. How another process maps it is
torch's own: by a CUDA IPC handle, and on a CPU, where this can be tried, by a name in shared memory. Handles and
responses go over a socket in the run's folder, which this user alone can open.

Nothing depends on it. The version is written to its folder too, for engines that are replaced, or that slept. An engine
takes it from there where this breaks off, and a rank gives up an engine that is gone, or silent for too long.
"""

from __future__ import annotations

import inspect
import logging
import pickle
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy, set_sharing_strategy
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from components.models.device import compute_device
from components.weights.bucket_sizes import SENT_BYTES
from components.weights.buckets import BucketFiller, pieces_of
from components.weights.carrier import CarrierSetting, FolderCarrier
from components.weights.publisher import WeightHandle

_DEVICE = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")
_log = logging.getLogger(__name__)


class IPCCarrier(FolderCarrier):
    """The `weight carrier` "ipc". On GPUs each rank sends to the engine on its device, on a CPU rank 0 to all."""

    NAME: ClassVar[str] = "ipc"

    def __init__(self, setting: CarrierSetting) -> None:
        super().__init__(setting)
        self._sender: BucketSender | None = None
        if self.gathers_everywhere or setting.rank == 0:
            readers = 1 if self.gathers_everywhere else setting.readers
            self._sender = BucketSender(setting.shared_dir, setting.device, readers, to_host=setting.rank == 0)

    @property
    def gathers_everywhere(self) -> bool:
        return self.setting.device.type == "cuda"

    def sent(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return tensors if self._sender is None else self._sender.sent(version, tensors)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        super().close()

    @classmethod
    def announced(cls, version: int, shared_dir: Path, route: Any, reader: int) -> WeightHandle:  # noqa: ARG003
        return WeightHandle(version, str(shared_dir), 0, carrier=cls.NAME, is_sent=True, reader=reader)

    @classmethod
    def read(
        cls, handle: WeightHandle, timeout_seconds: float, *, writable: bool, part: int
    ) -> Iterator[tuple[str, Tensor]]:
        if handle.is_sent:
            return read_sent(Path(handle.path), handle.version, timeout_seconds)
        return super().read(handle, timeout_seconds, writable=writable, part=part)


class BucketSender:
    """Of one rank, to the engines on its device."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        readers: int,
        bucket_bytes: int = SENT_BYTES,
        timeout_seconds: float = 60.0,
        to_host: bool = True,
    ) -> None:
        """
        Args:
            folder: of the run on this machine, for this user alone.
            device: that the weights are gathered on.
            readers: processes of engines on it, each of which reads every version.
            bucket_bytes: of the memory that they map.
            timeout_seconds: a reader may take to come, and for each bucket.
            to_host: see `BucketFiller`.
        """
        self.to_host = to_host
        self._device, self._readers = device, readers
        self._bucket_bytes, self._timeout_seconds = bucket_bytes, timeout_seconds
        self._path = _socket_of(folder, device)
        self._path.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self._path))
        self._listening.listen()

    def close(self) -> None:
        self._listening.close()
        self._path.unlink(missing_ok=True)

    def sent(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a version, each after it was copied into the bucket; see `BucketFiller.passed`. When it is
        exhausted every reader has them all, or was given up.
        """
        readers = self._arrived(version)
        transfer = _Transfer(readers, self._device, self._bucket_bytes, self.to_host, self._timeout_seconds)
        try:
            yield from transfer.passed(tensors)
            transfer.tell(lambda: b"")
        finally:
            transfer.close()

    def _arrived(self, version: int) -> list[Connection]:
        """Readers that want this version."""
        readers: list[Connection] = []
        until = time.monotonic() + self._timeout_seconds
        while len(readers) < self._readers and (left := until - time.monotonic()) > 0:
            self._listening.settimeout(left)
            try:
                reader = Connection(self._listening.accept()[0].detach())
                wanted = int(reader.recv_bytes()) if reader.poll(left) else None
            except (OSError, EOFError):
                continue  # nobody came in time, or somebody has left again
            if wanted == version:
                readers.append(reader)
            else:
                reader.close()
        if len(readers) < self._readers:
            text = "version %d of the weights: %d of %d readers on %s came within %g s"
            _log.warning(text, version, len(readers), self._readers, self._device, self._timeout_seconds)
        return readers


class _Transfer(BucketFiller):
    """Of one version."""

    def __init__(
        self,
        readers: list[Connection],
        device: torch.device,
        bucket_bytes: int,
        to_host: bool,
        timeout_seconds: float,
    ) -> None:
        super().__init__(device, bucket_bytes, to_host)
        self._readers, self._timeout_seconds = readers, timeout_seconds
        self._mapped_bytes = 0
        """Of the bucket, as the readers have mapped it."""

    def send(self) -> None:
        """Wait until every reader has a copy of what is in the bucket."""
        _finish_copies(self.bucket.device)
        is_mapped = self._mapped_bytes == len(self.bucket)
        self.tell(lambda: pickle.dumps((None if is_mapped else _handle(self.bucket), self.end, self.pieces)))
        self._mapped_bytes = len(self.bucket)

    def tell(self, message: Callable[[], bytes]) -> None:
        """Send each reader a message, made for it alone since torch counts who maps memory, and await its response."""
        for reader in list(self._readers):
            try:
                reader.send_bytes(message())
                _message(reader, self._timeout_seconds)
            except (OSError, EOFError, RuntimeError) as error:
                # torch keeps a bucket that somebody has mapped and not given back until this process ends.
                _log.warning("weights: an engine on %s was given up: %r", self.bucket.device, error)
                self._readers.remove(reader)
                reader.close()

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


def read_sent(folder: Path, version: int, timeout_seconds: float) -> Iterator[tuple[str, Tensor]]:
    """A version that a rank sends; tensors on this process's device, a bucket of its own at a time.

    Args:
        folder: of the `BucketSender`.
        version: that is wanted.
        timeout_seconds: for the rank to begin, and for each bucket.

    Raises:
        OSError, EOFError: there is no such rank, or it is gone, or silent.
        RuntimeError: its memory cannot be mapped.
    """
    device = compute_device()
    with socket.socket(socket.AF_UNIX) as connecting:
        connecting.settimeout(timeout_seconds)
        connecting.connect(str(_socket_of(folder, device)))
        connecting.settimeout(None)
        rank = Connection(connecting.detach())
    with rank:
        rank.send_bytes(str(version).encode())
        bucket = torch.empty(0)
        while message := _message(rank, timeout_seconds):
            handle, size, pieces = pickle.loads(message)
            bucket = bucket if handle is None else _mapped(handle, device)
            own = bucket[:size].clone()
            _finish_copies(device)
            rank.send_bytes(b"copied")
            yield from pieces_of(own, pieces)
            del own
        del bucket
        rank.send_bytes(b"done")


def _socket_of(folder: Path, device: torch.device) -> Path:
    """Processes may number the same GPUs differently."""
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_properties(device).uuid
    return folder / f"weights-{name}.socket"


def _handle(bucket: Tensor) -> bytes:
    """What another process maps the memory by."""
    strategy = get_sharing_strategy()
    set_sharing_strategy("file_system")  # of a CPU's memory: by name, as CUDA's is
    try:
        return bytes(ForkingPickler.dumps(reduce_tensor(bucket)))
    finally:
        set_sharing_strategy(strategy)


def _mapped(handle: bytes, device: torch.device) -> Tensor:
    rebuild, arguments = pickle.loads(handle)
    if device.type == "cuda":
        arguments = (*arguments[:_DEVICE], device.index, *arguments[_DEVICE + 1 :])
    return rebuild(*arguments)


def _message(connection: Connection, timeout_seconds: float) -> bytes:
    if not connection.poll(timeout_seconds):
        raise TimeoutError(f"nothing came in {timeout_seconds:g} s")
    return connection.recv_bytes()


def _finish_copies(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
