"""Base class of carriers that send a version to the engines while the ranks gather it.

The folder of such a version has its table only: names, dtypes, shapes and digests. An engine that lacks the version,
for example because it replaces another one, requests it, and the ranks send it once more, to this engine. The weights
are copied to the host only if the ranks cannot send them again (`CarrierSetting.keeps`), or if the second transfer to
an engine fails too.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from components.weights.all_gather import EverywhereBucket
from components.weights.buckets import Piece
from components.weights.carrier import CarrierSetting, FolderCarrier, seconds_of_parts
from components.weights.folder import VersionWriter, WrittenVersion
from components.weights.publisher import WeightHandle, WeightPublisher, read_folder, weight_shapes
from components.weights.timing import SyncTimer
from components.weights.verification import TensorDigests, open_digests

RESEND_S = 30.0
"""Time in seconds for which a rank waits for the engine that has requested a version again. The engine connects at
once, unless it has ended."""
_log = logging.getLogger(__name__)
_TABLE_SECONDS = 0.005
"""Interval in seconds at which a reader looks for the table of a version that it has received."""


class SentPublisher(WeightPublisher):
    """Publisher that may leave out the weights of a version."""

    def announced(self, version: int, *, is_kept: bool) -> WeightHandle:
        """Return the handle of a version that will be sent. Its table can be read once it was sent."""
        paths = [str(directory / self.folder_name(version)) for directory in self._directories]
        address = None if self._server is None else self._server.address
        return WeightHandle(
            version, paths[0], 0, self._token, address, is_sent=True, is_kept=is_kept, fallback_path=paths[-1]
        )

    def publish_table(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, digests: TensorDigests | None
    ) -> WeightHandle:
        """Write the table of a version. The version before it, which may have been requested, is removed."""
        newest = self._newest
        self.drop_all()
        self._newest = newest
        self._writer = TableWriter
        try:
            return self.publish(version, tensors, digests=digests)
        finally:
            self._writer = VersionWriter

    def has_published(self, version: int) -> bool:
        """True if this is the newest version, and its table or its weights can be read."""
        return self._newest == version

    def drop_all(self) -> None:
        """Remove all versions. The newest one may then be published again."""
        for _, written in self._published:
            shutil.rmtree(written.folder, ignore_errors=True)
        self._published.clear()
        self._newest = None


class TableWriter(VersionWriter):
    """Writer of a version without its weights."""

    def _recycle(self, old: WrittenVersion) -> bool:
        shutil.rmtree(old.folder, ignore_errors=True)
        return False

    def _copy(self, tensor: Tensor, piece: Piece, start: int) -> None:
        pass


class SendingCarrier(FolderCarrier, ABC):
    """A carrier that sends versions. A plug-in implements `sent`, `sent_again`, `route` and `read_sent`."""

    PUBLISHER: ClassVar[type[WeightPublisher]] = SentPublisher

    def __init__(self, setting: CarrierSetting) -> None:
        super().__init__(setting)
        self.gathers_everywhere = setting.device.type == "cuda"
        """True if every rank gathers the weights on its device; otherwise rank 0 does, on the host."""
        if self.gathers_everywhere:
            self.bucket_type = EverywhereBucket
        self._repeated: tuple[int, WeightHandle | None] | None = None
        """Version that was written to its folder last although it was sent, and its handle on rank 0."""

    @property
    @abstractmethod
    def route(self) -> Any:
        """See `WeightHandle.route`."""

    @property
    def _sent_publisher(self) -> SentPublisher | None:
        assert self.publisher is None or isinstance(self.publisher, SentPublisher)
        return self.publisher

    @property
    def can_send(self) -> bool:
        """False on rank 0 if versions are no longer sent, and only written to their folders."""
        return True

    @abstractmethod
    def sent(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype | None,
        digests: TensorDigests | None,
        *,
        to_host: bool,
    ) -> Iterable[tuple[str, Tensor]]:
        """Send a version in `dtype` while it is gathered.

        Args:
            version: number of the version.
            tensors: names and tensors.
            dtype: dtype in which they are sent. None: that of each tensor.
            digests: gets the digest of each tensor in this dtype. None: none are computed.
            to_host: yield the tensors on the host, for the folder.

        Returns:
            Names and tensors, in `dtype` or as they were gathered.
        """

    @abstractmethod
    def sent_again(
        self,
        handle: WeightHandle,
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype | None,
        digests: TensorDigests | None,
    ) -> Iterable[tuple[str, Tensor]]:
        """Send a version once more, to one engine. Its readers are `handle.reader` and those of its other processes.

        Nothing is raised if the engine does not come or has ended. See `sent`.
        """

    def announce(self, version: int) -> WeightHandle | None:
        publisher = self._sent_publisher
        if publisher is None or not self.can_send:
            return None
        announced = publisher.announced(version, is_kept=self.setting.keeps)
        return replace(announced, carrier=self.NAME, route=self.route)

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        dtype: torch.dtype | None = None,
        with_digests: bool,
        adapter_scale: float,
        again: WeightHandle | None = None,
    ) -> WeightHandle | None:
        """Send a version, and publish its table, or the version itself if it must be kept.

        With `again`, send the version to one engine, or write it to its folder, once for all engines that request it,
        and return the handle. See `FolderCarrier.publish`.
        """
        setting: dict[str, Any] = {"dtype": dtype, "with_digests": with_digests, "adapter_scale": adapter_scale}
        if again is not None and again.is_sent:
            return self._send_again(again, tensors, dtype, with_digests)
        if again is not None:
            # Gathering is collective. All ranks take the same decision, because each of them has published the same
            # versions.
            if self._repeated is None or self._repeated[0] != version:
                if (publisher := self._sent_publisher) is not None:
                    text = "version %d of the weights is written to shared memory: an engine did not receive it twice"
                    _log.warning(text, version)
                    publisher.drop_all()
                self._repeated = version, super().publish(version, tensors, **setting)
            return self._repeated[1]
        self._repeated = None
        began = time.monotonic()
        timer = SyncTimer()
        # Only rank 0 publishes digests.
        digests = open_digests(timer) if with_digests and self.publisher is not None else None
        keeps = self.setting.keeps or not self.can_send
        passed = self.sent(version, timer.waiting("gather", tensors), dtype, digests, to_host=keeps)
        publisher = self._sent_publisher
        if publisher is None:
            for _ in passed:
                assert self.gathers_everywhere, "only rank 0 is given parameters"
            return None
        publish = publisher.publish if keeps else publisher.publish_table
        handle = publish(version, _cast(passed, dtype, only_described=not keeps), digests=digests)
        return replace(handle, seconds=seconds_of_parts(timer, began))

    def _send_again(
        self,
        handle: WeightHandle,
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype | None,
        with_digests: bool,
    ) -> WeightHandle | None:
        publisher = self._sent_publisher
        # The first transfer has written the table, unless an error has ended it.
        has_table = publisher is None or publisher.has_published(handle.version)
        digests = open_digests() if with_digests and not has_table else None
        passed = self.sent_again(handle, tensors, dtype, digests)
        if publisher is not None:
            _log.warning("version %d of the weights is sent again, to the engine that lacks it", handle.version)
            if not has_table:
                publisher.publish_table(handle.version, _cast(passed, dtype, only_described=True), digests=digests)
        for _ in passed:
            assert self.gathers_everywhere or publisher is not None, "only rank 0 is given parameters"
        return None if publisher is None else handle

    @classmethod
    def read(
        cls, handle: WeightHandle, timeout_seconds: float, *, writable: bool, part: int
    ) -> Iterator[tuple[str, Tensor]]:
        if not handle.is_sent:
            yield from read_folder(handle, timeout_seconds, writable=writable)
            return
        try:
            yield from cls.read_sent(handle, timeout_seconds, part)
        except (OSError, EOFError, RuntimeError):
            # The engine reads a version that is kept next, and must find all of it.
            if handle.is_kept:
                with contextlib.suppress(FileNotFoundError):
                    _await_table(handle, timeout_seconds)
            raise
        _await_table(handle, timeout_seconds)

    @classmethod
    @abstractmethod
    def read_sent(cls, handle: WeightHandle, timeout_seconds: float, part: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of a version that the ranks send.

        Raises:
            ConnectionError: the version was sent before this process has requested it, or the ranks have aborted it.
            OSError, EOFError, RuntimeError: the ranks or other readers do not respond, or their memory cannot be read.
        """


def _cast(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, *, only_described: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in `dtype`, or only tensors of their shapes without memory."""
    for name, tensor in tensors:
        precision = dtype or tensor.dtype
        if only_described:
            yield name, torch.empty(tensor.shape, dtype=precision, device="meta")
        else:
            yield name, tensor.detach().to(precision)


def _await_table(handle: WeightHandle, timeout_seconds: float) -> None:
    """Wait for the table of a version that this process has received. Rank 0 writes it after the last weight.

    Raises:
        FileNotFoundError: it was not written in time.
    """
    until = time.monotonic() + timeout_seconds
    while True:
        try:
            weight_shapes(handle)
            return
        except FileNotFoundError:
            if time.monotonic() > until:
                raise
            time.sleep(_TABLE_SECONDS)
