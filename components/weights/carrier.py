"""Carriers of weights from the ranks of the policy to the engines.

`FolderCarrier` works everywhere. A plug-in provides a subclass as the `weight carrier` that `rollout.weight_sync`
names. The subclass may send a version while the ranks gather it; engines that missed it read the folder instead. Every
handle contains the name of the carrier, by which a reader finds the class.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from components.registry import load
from components.weights.choice import FOLDER_CARRIER
from components.weights.digest import Digests
from components.weights.publisher import WeightHandle, WeightPublisher, digested, read_folder
from components.weights.timing import SyncTimer


@dataclass(frozen=True, kw_only=True)
class CarrierSetting:
    """Facts of a run from which a carrier is created on each rank of the policy."""

    rank: int
    """Rank of the policy."""
    device: torch.device
    """Device on which this rank gathers the weights."""
    shared_dir: Path
    """Folder of the run in this machine's shared memory."""
    fallback_dir: Path
    """Folder for versions that do not fit into `shared_dir`."""
    readers: int
    """Total number of processes of all engines."""
    serve: bool
    """True if there are engines on other machines, to which versions must be served."""


class FolderCarrier:
    """Carrier on one rank of the policy. Rank 0 writes each version to a folder, which engines map into memory."""

    NAME: ClassVar[str] = FOLDER_CARRIER
    """Name of the carrier, as `rollout.weight_sync` takes it."""

    def __init__(self, setting: CarrierSetting) -> None:
        self.setting = setting
        self.publisher: WeightPublisher | None = None
        if setting.rank == 0:
            directory = setting.shared_dir / "policy"
            self.publisher = WeightPublisher(directory, setting.fallback_dir, serve=setting.serve)

    @property
    def gathers_everywhere(self) -> bool:
        """True if every rank gathers the weights on its device; otherwise rank 0 does, on the host."""
        return False

    @property
    def route(self) -> Any:
        """See `WeightHandle.route`."""
        return None

    def sent(
        self,
        version: int,  # noqa: ARG002
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype | None,
        digests: Digests | None,
    ) -> Iterable[tuple[str, Tensor]]:
        """Send a version in `dtype` while it is gathered.

        Args:
            version: number of the version.
            tensors: names and tensors.
            dtype: dtype in which they are sent. None: that of each tensor.
            digests: gets the digest of each tensor in this dtype. None: none are computed.

        Returns:
            Names and tensors, in `dtype` or as they were gathered.
        """
        tensors = _converted(tensors, dtype)
        return tensors if digests is None else digested(tensors, digests)

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        dtype: torch.dtype | None = None,
        with_digests: bool,
        adapter_scale: float,
    ) -> WeightHandle | None:
        """Send and publish a version; see `WeightPublisher.publish`. All ranks call this.

        Args:
            version: see `WeightPublisher.publish`.
            tensors: names and tensors.
            dtype: dtype in which they are published. Default: that of each tensor.
            with_digests: see `WeightPublisher.publish`.
            adapter_scale: see `WeightPublisher.publish`.

        Returns:
            The handle on rank 0, else None.
        """
        began = time.monotonic()
        timer = SyncTimer()
        # Only rank 0 publishes digests.
        digests = Digests(timer) if with_digests and self.publisher is not None else None
        tensors = self.sent(version, timer.waiting("gather", tensors), dtype, digests)
        if self.publisher is None:
            # Gathering is collective, so a rank that publishes nothing must exhaust the iterator too.
            for _ in tensors:
                assert self.gathers_everywhere, "only rank 0 is given parameters"
            return None
        handle = self.publisher.publish(
            version,
            _converted(tensors, dtype),
            with_digests=with_digests,
            adapter_scale=adapter_scale,
            digests=digests,
        )
        # The rest of the time, after the measured parts, is spent on writing and sending.
        send = time.monotonic() - began - sum(timer.seconds.values())
        return replace(handle, carrier=self.NAME, route=self.route, seconds=timer.seconds | {"send": send})

    def close(self) -> None:
        """Stop the carrier's threads and servers, and unlink its versions."""
        if self.publisher is not None:
            self.publisher.close()

    @classmethod
    def announced(cls, version: int, shared_dir: Path, route: Any, reader: int) -> WeightHandle | None:  # noqa: ARG003
        """Return the handle with which an engine reads a version while the ranks send it. None: the carrier does not
        send.

        Args:
            version: number of the version.
            shared_dir: folder of the run in the shared memory of the engine's machine.
            route: `route` of the last handle that the engine received, or None before the first.
            reader: number of the engine's first process among all readers, from 1.
        """
        return None

    @classmethod
    def read(
        cls,
        handle: WeightHandle,
        timeout_seconds: float,
        *,
        writable: bool,
        part: int,  # noqa: ARG003
    ) -> Iterator[tuple[str, Tensor]]:
        """Read the weights of a version in an engine's process; see `read_weights`."""
        return read_folder(handle, timeout_seconds, writable=writable)


def _converted(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor.detach().to(dtype or tensor.dtype)


def carrier_class(name: str) -> type[FolderCarrier]:
    """Return the class of the carrier that `rollout.weight_sync` names.

    Raises:
        MissingPlugin: no plug-in provides it.
    """
    return FolderCarrier if name == FOLDER_CARRIER else load("weight carrier", name, "rollout.weight_sync")
