"""Broadcast of weights from rank 0 of the policy to all engines, with one collective per bucket, from device to device.

Rank 0 and every process of every engine form a separate process group: NCCL between GPUs, gloo between CPUs. The group
is created once, and again after a version that was aborted, for example because an engine was replaced. The group
numbers and the contents of buckets are exchanged through a store on rank 0. The store is not encrypted, so the network
must be trusted.

    reader      "VERSION/READER": number of the group that the reader has joined, or 0
    rank 0      "VERSION/group": number of the group for this version; "VERSION/bucket 0", ...: bytes, pieces and first
                element of a slice, [] at the end; null instead of any of these if rank 0 has aborted the version
                "newest": number of the last version whose broadcast has ended

A broadcast may fail without loss: an engine that lacks the version requests it from the trainer (sending.py). Rank 0
and the processes of that engine then form a group of their own, which ends with the version. Its keys begin with the
identifier of the resend instead of the version, and the readers set "RESEND/READER end" once they have all weights.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from components.models.device import compute_device
from components.net.listening import listen_at
from components.process.heartbeat import beat
from components.weights.bucket_sizes import SENT_BYTES
from components.weights.buckets import Piece, pieces_of
from components.weights.carrier import CarrierSetting
from components.weights.filling import WHOLE, BucketFiller, SliceJoiner
from components.weights.publisher import WeightHandle
from components.weights.sending import RESEND_S, SendingCarrier
from components.weights.verification import TensorDigests

ARRIVAL_S = 600.0
"""Maximum number of seconds until all engines have arrived. They may first finish their current generation."""
ATTEMPTS = 3
"""Number of consecutive aborted versions after which no version is broadcast any more."""
_log = logging.getLogger(__name__)
_NULL = "null"


class BroadcastCarrier(SendingCarrier):
    """The weight carrier "broadcast"."""

    NAME: ClassVar[str] = "broadcast"

    def __init__(self, setting: CarrierSetting) -> None:
        super().__init__(setting)
        self._broadcaster: Broadcaster | None = None
        if setting.rank == 0:
            self._broadcaster = Broadcaster(setting.device, setting.readers, bucket_bytes=SENT_BYTES)

    @property
    def route(self) -> tuple[str, int] | None:
        """Address of the broadcaster. See `Broadcaster.address`."""
        if self._broadcaster is None:
            return None
        return self._broadcaster.address

    @property
    def can_send(self) -> bool:
        return self.route is not None

    def sent(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype | None,
        digests: TensorDigests | None,
        *,
        to_host: bool,
    ) -> Iterable[tuple[str, Tensor]]:
        if self._broadcaster is None:
            return tensors
        return self._broadcaster.sent(version, tensors, dtype, digests, to_host=to_host)

    def sent_again(
        self,
        handle: WeightHandle,
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype | None,
        digests: TensorDigests | None,
    ) -> Iterable[tuple[str, Tensor]]:
        if self._broadcaster is None:
            return tensors
        return self._broadcaster.sent_again(handle.resend, handle.parts, tensors, dtype, digests)

    def close(self) -> None:
        if self._broadcaster is not None:
            self._broadcaster.close()
        super().close()

    @classmethod
    def read_sent(cls, handle: WeightHandle, timeout_seconds: float, part: int) -> Iterator[tuple[str, Tensor]]:
        if handle.resend:
            return read_resent(handle.route, handle.reader + part, part + 1, handle.resend, timeout_seconds)
        return read_broadcast(handle.route, handle.reader + part, handle.version, timeout_seconds)


class Broadcaster:
    """Sender on rank 0 of the policy to all engines."""

    def __init__(
        self,
        device: torch.device,
        readers: int,
        host: str | None = None,
        bucket_bytes: int = SENT_BYTES,
        timeout_seconds: float = 60.0,
        arrival_seconds: float = ARRIVAL_S,
    ) -> None:
        """
        Args:
            device: device on which the weights are gathered.
            readers: number of processes of all engines. They are numbered from 1.
            host: address of this machine for the readers. Default: MASTER_ADDR, or else 127.0.0.1.
            bucket_bytes: size of one message in bytes.
            timeout_seconds: timeout of one message, and of the creation of the group.
            arrival_seconds: maximum number of seconds until the last reader has arrived.
        """
        host = host or os.environ.get("MASTER_ADDR", "127.0.0.1")
        listening = listen_at(host)
        self._address: tuple[str, int] = listening.getsockname()[:2]
        store = _store(self._address, timeout_seconds, listening.detach())
        store.set("size", str(readers + 1))
        self._member = _Member(store, 0, readers + 1, device, timeout_seconds)
        self._bucket_bytes = bucket_bytes
        self._timeout_seconds = timeout_seconds
        self._arrival_seconds = arrival_seconds
        self._groups = self._failures = 0
        self._keys: list[str] = []
        """Keys in the store of the last version."""
        self._old: list[str] = []
        """Keys in the store of earlier versions, which are deleted at the next version."""

    @property
    def address(self) -> tuple[str, int] | None:
        """Address to which readers connect, or None if no more versions are broadcast."""
        if self._failures >= ATTEMPTS:
            return None
        return self._address

    def sent(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype | None = None,
        digests: TensorDigests | None = None,
        *,
        to_host: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Broadcast a version in `dtype`, by default that of each tensor, and compute digests. Yield its tensors (see
        `BucketFiller.passed`).

        When the iterator is exhausted, either every reader has all tensors, or the version was aborted.
        """
        transfer = _Transfer(self._member, str(version), self._bucket_bytes, to_host, dtype, digests)
        self._old += self._keys
        self._keys = transfer.keys
        is_sent = self.address is not None
        if is_sent:
            transfer.attempt(lambda: self._meet(version))
        else:
            transfer.is_over = True
        try:
            yield from transfer.passed(tensors)
            transfer.reclaim_all()
        except BaseException as error:
            transfer.give_up(error)
            raise
        finally:
            self._member.store.set("newest", str(version))
        if not transfer.is_over:
            transfer.announce([])
            # Only consecutive aborted versions count.
            self._failures = 0
        elif is_sent:
            self._failures += 1
        if is_sent and self._failures == ATTEMPTS:
            text = "weights: %d versions broke off, and no more are broadcast; later ones are written to shared memory"
            _log.warning(text, self._failures)

    def sent_again(
        self,
        resend: str,
        parts: int,
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype | None = None,
        digests: TensorDigests | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Send a version to one engine that lacks it, in a group that ends with the version. See `sent`.

        Args:
            resend: identifier of the transfer.
            parts: number of processes of the engine.
            tensors: names and tensors.
            dtype: see `sent`.
            digests: see `sent`.
        """
        store, device = self._member.store, self._member.device
        member = _Member(store, 0, parts + 1, device, self._timeout_seconds)
        transfer = _Transfer(member, resend, self._bucket_bytes, False, dtype, digests)
        readers = [f"{resend}/{reader}" for reader in range(1, parts + 1)]
        ends = [f"{reader} end" for reader in readers]
        self._old += [*readers, *ends, f"{resend}/size"]
        if self.address is None:
            transfer.give_up(ConnectionError("no more versions are broadcast"))
        else:
            transfer.attempt(lambda: self._meet_again(member, resend, readers))
        try:
            yield from transfer.passed(tensors)
            transfer.reclaim_all()
            if not transfer.is_over:
                transfer.announce([])
                # A group that one member leaves may lose what the others have not received yet.
                transfer.attempt(lambda: _await_all(store, ends, self._timeout_seconds))
        except BaseException as error:
            transfer.give_up(error)
            raise
        finally:
            self._old += transfer.keys
            member.leave()

    def _meet_again(self, member: _Member, resend: str, readers: list[str]) -> None:
        _await_all(member.store, readers, RESEND_S)
        self._groups += 1
        member.store.set(f"{resend}/size", str(member.size))
        member.store.set(f"{resend}/group", str(self._groups))
        member.join(self._groups)

    def _meet(self, version: int) -> None:
        """Wait until all readers have arrived, and join a group with them. A new group is created if a reader is in
        none.
        """
        member = self._member
        until = time.monotonic() + self._arrival_seconds
        readers = [f"{version}/{reader}" for reader in range(1, member.size)]
        self._keys += readers
        groups = {int(_awaited(member.store, key, until - time.monotonic())) for key in readers}
        # All readers have arrived for this version, so none of them reads keys of an older one.
        for key in self._old:
            member.store.delete_key(key)
        self._old = []
        group = member.group
        if groups != {group} or not group:
            self._groups += 1
            group = self._groups
            if group > 1:
                _log.warning("version %d of the weights: rank 0 and the engines create a new process group", version)
        member.store.set(f"{version}/group", str(group))
        member.join(group)

    def close(self) -> None:
        self._member.leave()


class _Transfer(BucketFiller):
    """Broadcast of one version from rank 0."""

    def __init__(
        self,
        member: _Member,
        label: str,
        bucket_bytes: int,
        to_host: bool,
        dtype: torch.dtype | None,
        digests: TensorDigests | None,
    ) -> None:
        super().__init__(member.device, bucket_bytes, to_host, dtype, digests)
        self._member = member
        self._label = label
        """First part of the keys: the version, or the identifier of a resend."""
        self._announced = 0
        self._works: dict[int, Any] = {}
        """Broadcast of each bucket that is under way."""
        self.keys = [f"{label}/group"]
        self.is_over = False

    def send(self) -> None:
        if not self.is_over:
            self.attempt(self._broadcast)

    def reclaim(self) -> None:
        """Wait until the bucket has been broadcast."""
        work = self._works.pop(self.slot, None)
        if work is not None and not self.is_over:
            self.attempt(work.wait)

    def _broadcast(self) -> None:
        self.announce([self.end, self.pieces, self.start])
        self._works[self.slot] = self._member.broadcast(self.bucket[: self.end])

    def announce(self, content: list[Any] | None) -> None:
        """Announce the next message to the readers: its content, or [] for the end, or None if it was aborted."""
        key = f"{self._label}/bucket {self._announced}"
        self._member.store.set(key, json.dumps(content))
        self.keys.append(key)
        self._announced += 1

    def attempt(self, step: Callable[[], None]) -> None:
        """Run a step of the broadcast. An error aborts the broadcast of this version, but not the training."""
        try:
            step()
        except (RuntimeError, TimeoutError) as error:
            self.give_up(error)

    def give_up(self, error: BaseException) -> None:
        """Abort the broadcast. The readers raise an error, and their engines request the version."""
        text = "transfer %s of the weights is not broadcast to the end; engines that lack it request it: %s"
        _log.warning(text, self._label, error)
        self.is_over = True
        self._member.leave()
        # The store may be gone too. Readers then run into their timeout.
        with contextlib.suppress(RuntimeError):
            self._member.store.set(f"{self._label}/group", _NULL)
            self.announce(None)


def read_broadcast(
    address: tuple[str, int], reader: int, version: int, timeout_seconds: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a version that rank 0 broadcasts, on this process's device. One bucket is allocated at a
    time.

    Args:
        address: address of the `Broadcaster`.
        reader: number of this process among all readers, from 1.
        version: version to read.
        timeout_seconds: timeout of each bucket.

    Raises:
        ConnectionError: rank 0 has aborted the version, or has sent it before.
        TimeoutError, RuntimeError: rank 0 or another reader has ended or does not respond.
    """
    member = _membership(address, reader, timeout_seconds)
    _check_newest(member.store, version)
    member.store.set(f"{version}/{reader}", str(member.group))
    group = _awaited(member.store, f"{version}/group", ARRIVAL_S, lambda: _check_newest(member.store, version))
    yield from _read(member, str(version), group, timeout_seconds)


def read_resent(
    address: tuple[str, int], reader: int, rank: int, resend: str, timeout_seconds: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a version that rank 0 sends to this engine only. See `read_broadcast`.

    Args:
        address: address of the `Broadcaster`.
        reader: number of this process among all readers, from 1.
        rank: number of this process among those of its engine, from 1.
        resend: identifier of the transfer.
        timeout_seconds: timeout of each bucket.
    """
    store = _membership(address, reader, timeout_seconds).store
    store.set(f"{resend}/{rank}", "")
    group = _awaited(store, f"{resend}/group", RESEND_S + timeout_seconds)
    size = 0
    # Rank 0 has set the size before the group, unless it has aborted the transfer.
    if group != _NULL:
        size = int(_awaited(store, f"{resend}/size", timeout_seconds))
    member = _Member(store, rank, size, compute_device(), timeout_seconds)
    yield from _read(member, resend, group, timeout_seconds)
    store.set(f"{resend}/{rank} end", "")
    member.leave()


def _read(member: _Member, label: str, group: str, timeout_seconds: float) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a version in a group.

    Args:
        member: this process.
        label: first part of the keys in the store.
        group: number of the group, or null if the version is not broadcast.
        timeout_seconds: timeout of each bucket.
    """
    is_complete = False
    slices = SliceJoiner()
    try:
        if group == _NULL:
            raise ConnectionError(f"transfer {label} of the weights is not broadcast")
        member.join(int(group))
        for number in itertools.count():
            content = json.loads(_awaited(member.store, f"{label}/bucket {number}", timeout_seconds))
            if content is None:
                raise ConnectionError(f"transfer {label} of the weights was not broadcast to the end")
            if not content:
                break
            nbytes, listed, start = content
            pieces = [Piece.from_json(piece) for piece in listed]
            bucket = torch.empty(nbytes, dtype=torch.uint8, device=member.device)
            member.broadcast(bucket).wait()
            yield from pieces_of(bucket, pieces) if start == WHOLE else slices.joined(bucket, pieces, start)
            # Frees the device memory before the next bucket is allocated.
            del bucket
        is_complete = True
    finally:
        # The other members may be in another collective, so the group cannot be used any more.
        if not is_complete:
            member.leave()


class _Member:
    """One process, which may be a member of a process group."""

    group = 0
    """Number of the group, or 0 if the process is in none."""
    _joined: Any = None

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, timeout_seconds: float) -> None:
        self.store = store
        self._rank = rank
        self.size = size
        self.device = device
        self._timeout = timedelta(seconds=timeout_seconds)

    def join(self, group: int) -> None:
        """Join a group. All of its members call this.

        Raises:
            TimeoutError, RuntimeError: a member did not call it, or cannot be reached.
        """
        if group == self.group:
            return
        # A process group of NCCL holds device memory until it is aborted.
        self.leave()
        made: list[Any] = []
        # In a thread, because NCCL has no timeout while it connects. A hanging thread is abandoned.
        making = threading.Thread(target=self._make, args=(group, made), daemon=True)
        making.start()
        making.join(self._timeout.total_seconds())
        if not made:
            raise TimeoutError(f"rank 0 and the engines made no group in {self._timeout.total_seconds():g} s")
        if isinstance(made[0], Exception):
            raise made[0]
        self._joined = made[0]
        self.group = group

    def _make(self, group: int, made: list[Any]) -> None:
        c10d: Any = dist
        store = c10d.PrefixStore(f"group {group}", self.store)
        try:
            if self.device.type == "cuda":
                # The current device belongs to a thread and is 0 at its start.
                torch.cuda.set_device(self.device)
                options = c10d.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                with _blocking_wait():
                    joined = c10d.ProcessGroupNCCL(store, self._rank, self.size, options)
            else:
                joined = c10d.ProcessGroupGloo(store, self._rank, self.size, self._timeout)
            joined.broadcast(torch.zeros(1, device=self.device), 0).wait()  # the first collective connects the members
            made.append(joined)
        except RuntimeError as error:
            made.append(error)

    def leave(self) -> None:
        if self._joined is not None:
            self._joined.abort()
        self._joined = None
        self.group = 0

    def broadcast(self, bucket: Tensor) -> Any:
        """Start to broadcast a bucket from rank 0. Return the work, whose `wait` ends when it is sent or received."""
        return self._joined.broadcast(bucket, 0)


@contextlib.contextmanager
def _blocking_wait() -> Iterator[None]:
    """Make groups that are created inside the context raise an error on a timeout. torch would end the process
    instead.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


_members: dict[tuple[tuple[str, int], int], _Member] = {}
"""Readers of this process, by the address of the broadcaster and the number of the reader."""


def _membership(address: tuple[str, int], reader: int, timeout_seconds: float) -> _Member:
    if (address, reader) not in _members:
        store = _store(address, timeout_seconds)
        size = int(_awaited(store, "size", timeout_seconds))
        _members[address, reader] = _Member(store, reader, size, compute_device(), timeout_seconds)
    return _members[address, reader]


def _store(address: tuple[str, int], timeout_seconds: float, listening: int | None = None) -> Any:
    """Return the store of rank 0, given its listening socket, or a reader's connection to that store."""
    c10d: Any = dist
    timeout = timedelta(seconds=timeout_seconds)
    # The listening socket was created by the caller, so the store cannot lose its port to another process.
    is_master = listening is not None
    return c10d.TCPStore(*address, None, is_master, timeout, wait_for_workers=False, master_listen_fd=listening)


def _check_newest(store: Any, version: int) -> None:
    """Raise ConnectionError if rank 0 has sent a version to other readers already."""
    if store.check(["newest"]) and int(store.get("newest")) >= version:
        raise ConnectionError(f"version {version} of the weights was sent before this process requested it")


def _await_all(store: Any, keys: Iterable[str], seconds: float) -> None:
    """Wait for keys of the store.

    Raises:
        TimeoutError: one of them did not come in this number of seconds.
    """
    until = time.monotonic() + seconds
    for key in keys:
        _awaited(store, key, until - time.monotonic())


def _awaited(store: Any, key: str, seconds: float, check: Callable[[], None] = lambda: None) -> str:
    """Wait for a key of the store and return its value. Call `check` every second.

    Raises:
        TimeoutError: it did not come in this number of seconds.
    """
    c10d: Any = dist
    until = time.monotonic() + seconds
    while True:
        try:
            store.wait([key], timedelta(seconds=min(1.0, max(0.01, until - time.monotonic()))))
            return store.get(key).decode()
        except c10d.DistStoreError:
            check()
            if time.monotonic() > until:
                raise TimeoutError(f"{key!r} of the weights did not come in {seconds:.0f} s") from None
            # A long wait must not look like a hung worker.
            beat()
