"""Transfer of weights from a rank to the engines on the same device, without the host: all map the memory of a bucket.

There are two buckets. The rank fills one while each engine copies the other one and confirms. The memory is shared by
torch: with a CUDA IPC handle, or on a CPU, where the carrier can be tried, with a name in shared memory. Handles and
confirmations are sent over a socket in the run's folder, which only this user can open.

An engine keeps its connection to the rank between versions, so the rank sees at once that an engine has ended, and does
not wait for it. A file beside the socket has the number of the last version that was sent, so an engine that replaces
another one sees at once that it is late. It then requests the version from the trainer, and all ranks gather it once
more (sending.py). Requests contain the number of the reader, so a rank knows whether that engine is on its device.
"""

from __future__ import annotations

import inspect
import logging
import pickle
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy, set_sharing_strategy
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from components.models.device import compute_device
from components.weights.bucket_sizes import SENT_BYTES
from components.weights.buckets import pieces_of
from components.weights.carrier import CarrierSetting
from components.weights.filling import WHOLE, BucketFiller, SliceJoiner, finish_copies
from components.weights.publisher import WeightHandle
from components.weights.sending import RESEND_S, SendingCarrier
from components.weights.verification import TensorDigests
from plugins.weights_ipc.segments import allocator_settings, are_expandable, fixed_segment

_DEVICE = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")
REPLACEMENT_S = 5.0
"""Time in seconds for which a rank waits for an engine, if the connection of the one before it is closed."""
ATTEMPTS = 3
"""Number of consecutive versions that a reader did not receive after which a rank sends no more versions."""
LOOK_S = 0.2
"""Interval in seconds at which a waiting engine looks whether the version was sent without it."""
_log = logging.getLogger(__name__)
_ranks: dict[Path, Connection] = {}
"""Connection of this process to the rank at each socket."""


class IPCCarrier(SendingCarrier):
    """The weight carrier "ipc". On GPUs each rank sends to the engine on its device. On a CPU rank 0 sends to all."""

    NAME: ClassVar[str] = "ipc"

    def __init__(self, setting: CarrierSetting) -> None:
        super().__init__(setting)
        self._sender: BucketSender | None = None
        if self.gathers_everywhere or setting.rank == 0:
            readers = setting.readers
            if self.gathers_everywhere:
                readers = 1
            self._sender = BucketSender(setting.shared_dir, setting.device, readers, SENT_BYTES)

    @property
    def can_send(self) -> bool:
        # With several senders, rank 0 does not know of the others. Their engines request each version then.
        is_only = self.setting.readers == 1 or not self.gathers_everywhere
        return not (is_only and self._sender is not None and self._sender.has_given_up)

    @property
    def route(self) -> str:
        """Folder of the run, which is the same on each machine."""
        return str(self.setting.shared_dir)

    def sent(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype | None,
        digests: TensorDigests | None,
        *,
        to_host: bool,
    ) -> Iterable[tuple[str, Tensor]]:
        if self._sender is None:
            return tensors
        return self._sender.sent(version, tensors, dtype, digests, to_host=to_host)

    def sent_again(
        self,
        handle: WeightHandle,
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype | None,
        digests: TensorDigests | None,
    ) -> Iterable[tuple[str, Tensor]]:
        if self._sender is None:
            return tensors
        numbers = range(handle.reader, handle.reader + handle.parts)
        return self._sender.sent_again(handle.version, handle.resend, numbers, tensors, dtype, digests)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        super().close()

    @classmethod
    def read_sent(cls, handle: WeightHandle, timeout_seconds: float, part: int) -> Iterator[tuple[str, Tensor]]:
        number = handle.reader + part
        return read_sent(Path(handle.route), handle.version, timeout_seconds, number, handle.resend)


class BucketSender:
    """Sender of one rank to the engines on its device."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        readers: int,
        bucket_bytes: int = SENT_BYTES,
        timeout_seconds: float = 60.0,
    ) -> None:
        """
        Args:
            folder: folder of the run on this machine, accessible to this user only.
            device: device on which the weights are gathered.
            readers: number of engine processes on the device. Each of them reads every version.
            bucket_bytes: size of each of the two shared buckets in bytes.
            timeout_seconds: timeout until readers that have not ended arrive, and of each bucket.
        """
        self._device = device
        self._readers = readers
        self._bucket_bytes = bucket_bytes
        self._timeout_seconds = timeout_seconds
        self._connected: list[Connection] = []
        """Connections of the readers that have not ended."""
        self._numbers: set[int] = set()
        """Numbers of the readers on the device that have requested a version."""
        self._has_sent = False
        self._failures = 0
        if device.type == "cuda" and are_expandable():
            text = "weights: torch's allocator is set to %s; the buckets for CUDA IPC are allocated in fixed segments"
            _log.warning(text, allocator_settings())
        self._path = _socket_of(folder, device)
        self._newest = _newest_of(self._path)
        self._remove_files()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self._path))
        self._listening.listen()

    @property
    def has_given_up(self) -> bool:
        """True if no more versions are sent, after ATTEMPTS consecutive ones that a reader did not receive."""
        return self._failures >= ATTEMPTS

    def close(self) -> None:
        self._listening.close()
        for reader in self._connected:
            reader.close()
        self._connected = []
        self._remove_files()

    def _remove_files(self) -> None:
        for path in (self._path, self._newest):
            path.unlink(missing_ok=True)

    def sent(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype | None = None,
        digests: TensorDigests | None = None,
        *,
        to_host: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Send a version in `dtype`, by default that of each tensor, and compute digests. Yield its tensors (see
        `BucketFiller.passed`).

        When the iterator is exhausted, every reader has all tensors or was given up.
        """
        is_sent = not self.has_given_up
        limit = self._timeout_seconds
        readers = self._arrived(version, "", self._readers, limit) if is_sent else []
        transfer = _Transfer(readers, self._device, self._bucket_bytes, to_host, self._timeout_seconds, dtype, digests)
        try:
            yield from transfer.passed(tensors)
            transfer.reclaim_all()
            transfer.finish()
        except BaseException:
            # Readers that wait for the next bucket have to see that it will not come.
            transfer.close()
            raise
        finally:
            self._has_sent = True
            if is_sent:
                self._newest.write_text(str(version))
        self._connected += readers
        if is_sent:
            self._count(is_complete=len(readers) == self._readers)

    def sent_again(
        self,
        version: int,
        resend: str,
        numbers: Collection[int],
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype | None = None,
        digests: TensorDigests | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Send a version to the readers of one engine that lacks it, as far as they are on this device. See `sent`.

        Args:
            version: number of the version.
            resend: identifier of this transfer, which the readers request.
            numbers: numbers of the readers.
            tensors: names and tensors.
            dtype: see `sent`.
            digests: see `sent`.
        """
        expected = min(len(numbers), self._readers)
        # Once all readers of the device are known, a rank does not wait for an engine on another one.
        if len(self._numbers) == self._readers:
            expected = len(self._numbers.intersection(numbers))
        if self.has_given_up:
            expected = 0
        readers = self._arrived(version, resend, expected, RESEND_S)
        if not readers and digests is None:
            yield from tensors
            return
        transfer = _Transfer(readers, self._device, self._bucket_bytes, False, self._timeout_seconds, dtype, digests)
        try:
            yield from transfer.passed(tensors)
            transfer.reclaim_all()
            transfer.finish()
        except BaseException:
            transfer.close()
            raise
        self._connected += readers

    def _count(self, *, is_complete: bool) -> None:
        """Count consecutive versions that a reader did not receive, and give up after ATTEMPTS of them."""
        self._failures = 0 if is_complete else self._failures + 1
        if self.has_given_up:
            text = "weights: %d versions did not arrive on %s, and no more are sent; later ones are in shared memory"
            _log.warning(text, self._failures, self._device)
            # Without the socket, an engine sees at once that nothing comes.
            self.close()

    def _arrived(self, version: int, resend: str, count: int, seconds: float) -> list[Connection]:
        """Return the connections of the readers that request this version.

        A connected reader may still be busy. If no reader is connected, they have all ended, and only a replacement
        that has already started can still connect.

        Args:
            version: number of the version.
            resend: identifier of a transfer to one engine, or an empty string.
            count: number of readers to wait for.
            seconds: timeout.
        """
        readers: list[Connection] = []
        began = time.monotonic()
        while len(readers) < count:
            limit = seconds
            if not resend and self._has_sent and not self._connected:
                limit = min(limit, REPLACEMENT_S)
            left = began + limit - time.monotonic()
            if left <= 0:
                break
            for source in wait([self._listening, *self._connected], left):
                if source is self._listening:
                    self._connected.append(Connection(self._listening.accept()[0].detach()))
                    continue
                reader: Any = source
                self._connected.remove(reader)
                number, *request = _requested(reader)
                if request == [str(version), resend]:
                    readers.append(reader)
                    self._numbers.add(int(number))
                else:
                    # It has ended, or was late for this version or an older one.
                    reader.close()
        if len(readers) < count:
            text = "version %d of the weights: %d of %d readers on %s came in %.0f s; the others may request it"
            _log.warning(text, version, len(readers), count, self._device, time.monotonic() - began)
        return readers


class _Transfer(BucketFiller):
    """Transfer of one version."""

    def __init__(
        self,
        readers: list[Connection],
        device: torch.device,
        bucket_bytes: int,
        to_host: bool,
        timeout_seconds: float,
        dtype: torch.dtype | None,
        digests: TensorDigests | None,
    ) -> None:
        super().__init__(device, bucket_bytes, to_host, dtype, digests)
        self._readers = readers
        self._timeout_seconds = timeout_seconds
        self._is_mapped = [False, False]
        """True for each bucket that the readers have mapped."""
        self._unconfirmed = [False, False]
        """True for each bucket that the readers have not confirmed yet. They confirm in the order of sending."""
        self._pools: list[Any] = []
        """Memory pools of the buckets, which are kept as long as the buckets."""

    def _new_bucket(self) -> Tensor:
        with fixed_segment() as pool:
            self._pools.append(pool)
            return super()._new_bucket()

    def send(self) -> None:
        """Send the readers the table of the bucket, and a handle if its memory is new."""
        is_mapped = self._is_mapped[self.slot]

        def message() -> bytes:
            handle = None
            if not is_mapped:
                handle = _handle(self.bucket)
            return pickle.dumps((self.slot, handle, self.end, self.pieces, self.start))

        # Pickled once per reader, because torch counts the processes that map a handle.
        self._post(message)
        self._is_mapped[self.slot] = True
        self._unconfirmed[self.slot] = True

    def reclaim(self) -> None:
        """Wait until every reader has a copy of the bucket's content."""
        if self._unconfirmed[self.slot]:
            self._confirm()
        self._unconfirmed[self.slot] = False

    def finish(self) -> None:
        """Announce the end to the readers, and wait until they have unmapped the buckets."""
        self._post(lambda: b"")
        self._confirm()

    def _post(self, message: Callable[[], bytes]) -> None:
        for reader in list(self._readers):
            try:
                reader.send_bytes(message())
            except (OSError, RuntimeError) as error:
                self._give_up(reader, error)

    def _confirm(self) -> None:
        """Read the oldest confirmation of each reader that is due."""
        for reader in list(self._readers):
            try:
                _message(reader, self._timeout_seconds)
            except (OSError, EOFError) as error:
                self._give_up(reader, error)

    def _give_up(self, reader: Connection, error: Exception) -> None:
        # torch keeps a bucket that was mapped and not returned until this process ends.
        _log.warning("weights: an engine on %s was given up: %r", self.device, error)
        self._readers.remove(reader)
        reader.close()

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


def read_sent(
    folder: Path, version: int, timeout_seconds: float, number: int = 0, resend: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a version that a rank sends, on this process's device. One bucket is copied at a time.

    Args:
        folder: folder of the `BucketSender`.
        version: version to read.
        timeout_seconds: timeout until the rank begins, and of each bucket.
        number: number of this process among all readers.
        resend: see `WeightHandle.resend`.

    Raises:
        ConnectionError: the rank has sent the version before, and this is not a resend.
        OSError, EOFError: there is no such rank, or it has ended or does not respond.
        RuntimeError: its memory cannot be mapped.
    """
    device = compute_device()
    path = _socket_of(folder, device)
    rank = _ranks.pop(path, None) or _connection_to(path, timeout_seconds)
    try:
        rank.send_bytes(f"{number}/{version}/{resend}".encode())
        _await_turn(rank, path, None if resend else version, timeout_seconds)
        buckets: dict[int, Tensor] = {}
        slices = SliceJoiner()
        while message := _message(rank, timeout_seconds):
            slot, handle, size, pieces, start = pickle.loads(message)
            if handle is not None:
                buckets[slot] = _mapped(handle, device)
            # Copied before the rank fills the bucket again.
            if start == WHOLE:
                copy = buckets[slot][:size].clone()
                arrived = pieces_of(copy, pieces)
            else:
                arrived = iter(list(slices.joined(buckets[slot][:size], pieces, start)))
            finish_copies(device)
            rank.send_bytes(b"copied")
            yield from arrived
            # Frees the device memory before the next bucket is copied.
            copy = None
            del arrived
        buckets.clear()
        rank.send_bytes(b"done")
    except BaseException:
        rank.close()
        raise
    _ranks[path] = rank


def _connection_to(path: Path, timeout_seconds: float) -> Connection:
    with socket.socket(socket.AF_UNIX) as connecting:
        connecting.settimeout(timeout_seconds)
        connecting.connect(str(path))
        connecting.settimeout(None)
        return Connection(connecting.detach())


def _await_turn(rank: Connection, path: Path, version: int | None, timeout_seconds: float) -> None:
    """Wait until the rank has a message for this process. Without a version, it is not sent to other readers first.

    Raises:
        ConnectionError: the rank has sent the version to other readers.
        TimeoutError: it does not send it.
    """
    until = time.monotonic() + timeout_seconds
    while not rank.poll(min(LOOK_S, max(0.0, until - time.monotonic()))):
        newest = _newest_of(path)
        if version is not None and newest.exists() and int(newest.read_text() or -1) >= version:
            raise ConnectionError(f"version {version} of the weights was sent before this process requested it")
        if time.monotonic() > until:
            raise TimeoutError(f"nothing came in {timeout_seconds:g} s")


def _requested(reader: Connection) -> list[str]:
    """Return the number of a reader, the version that it requests, and the identifier of a resend. If the reader has
    ended, there is no version.
    """
    try:
        return reader.recv_bytes().decode().split("/")
    except (OSError, EOFError):
        return ["0"]


def _socket_of(folder: Path, device: torch.device) -> Path:
    """Return the path of the socket for a device. GPUs are named by uuid, as processes may number them differently."""
    name = "cpu"
    if device.type != "cpu":
        name = str(torch.cuda.get_device_properties(device).uuid)
    return folder / f"weights-{name}.socket"


def _newest_of(path: Path) -> Path:
    """Return the path of the file with the last version that was sent over a socket."""
    return path.with_suffix(".newest")


def _handle(bucket: Tensor) -> bytes:
    """Return a handle with which another process can map the memory."""
    strategy = get_sharing_strategy()
    # On a CPU shared memory is passed by name. The default strategy passes a file descriptor, which cannot be pickled.
    set_sharing_strategy("file_system")
    try:
        return bytes(ForkingPickler.dumps(reduce_tensor(bucket)))
    finally:
        set_sharing_strategy(strategy)


def _mapped(handle: bytes, device: torch.device) -> Tensor:
    rebuild, arguments = pickle.loads(handle)
    if device.type == "cuda":
        # The sender's device index may belong to another GPU in this process.
        arguments = (*arguments[:_DEVICE], device.index, *arguments[_DEVICE + 1 :])
    return rebuild(*arguments)


def _message(connection: Connection, timeout_seconds: float) -> bytes:
    if not connection.poll(timeout_seconds):
        raise TimeoutError(f"nothing came in {timeout_seconds:g} s")
    return connection.recv_bytes()
