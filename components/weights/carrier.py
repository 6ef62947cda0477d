"""Carriers of weights from the ranks of the policy to the engines.

`FolderCarrier` works everywhere. A plug-in provides a subclass as the `weight carrier` that `rollout.weight_sync`
names; one that sends versions while the ranks gather them extends `SendingCarrier` (sending.py). Every handle contains
the name of the carrier, by which a reader finds the class.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from components.registry import load
from components.weights.choice import FOLDER_CARRIER
from components.weights.gather import Bucket
from components.weights.publisher import WeightHandle, WeightPublisher, digested, read_folder
from components.weights.timing import SyncTimer
from components.weights.verification import open_digests


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
    keeps: bool = False
    """True if every version must be written to its folder, because the ranks cannot send it again: they train while
    engines generate, or they sleep."""


class FolderCarrier:
    """Carrier on one rank of the policy. Rank 0 writes each version to a folder, which engines map into memory."""

    NAME: ClassVar[str] = FOLDER_CARRIER
    """Name of the carrier, as `rollout.weight_sync` takes it."""
    PUBLISHER: ClassVar[type[WeightPublisher]] = WeightPublisher

    def __init__(self, setting: CarrierSetting) -> None:
        self.setting = setting
        self.publisher: WeightPublisher | None = None
        if setting.rank == 0:
            directory = setting.shared_dir / "policy"
            self.publisher = self.PUBLISHER(directory, setting.fallback_dir, serve=setting.serve)

    bucket_type: type[Bucket] = Bucket
    """Class that gathers the weights: on the host of rank 0, or on the device of every rank."""

    def announce(self, version: int) -> WeightHandle | None:  # noqa: ARG002
        """Return the handle by which engines receive a version that the ranks are about to send. None: the version is
        not sent, or this is not rank 0.
        """
        return None

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        dtype: torch.dtype | None = None,
        with_digests: bool,
        adapter_scale: float,
        again: WeightHandle | None = None,  # noqa: ARG002
    ) -> WeightHandle | None:
        """Publish a version; see `WeightPublisher.publish`. All ranks call this.

        Args:
            version: see `WeightPublisher.publish`.
            tensors: names and tensors.
            dtype: dtype in which they are published. Default: that of each tensor.
            with_digests: see `WeightPublisher.publish`.
            adapter_scale: see `WeightPublisher.publish`.
            again: handle of an engine that lacks the version, which was sent before. If it `is_sent`, the version is
                sent once more, to this engine. Otherwise it is written to its folder. Used only by carriers that send.

        Returns:
            The handle on rank 0, else None.
        """
        began = time.monotonic()
        timer = SyncTimer()
        tensors = _converted(timer.waiting("gather", tensors), dtype)
        if self.publisher is None:
            # Gathering is collective, so a rank that publishes nothing must exhaust the iterator too.
            for _ in tensors:
                assert self.bucket_type is not Bucket, "only rank 0 is given parameters"
            return None
        digests = open_digests(timer) if with_digests else None
        if digests is not None:
            tensors = digested(tensors, digests)
        handle = self.publisher.publish(version, tensors, adapter_scale=adapter_scale, digests=digests)
        return replace(handle, carrier=self.NAME, seconds=seconds_of_parts(timer, began))

    def close(self) -> None:
        """Stop the carrier's threads and servers, and unlink its versions."""
        if self.publisher is not None:
            self.publisher.close()

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


def seconds_of_parts(timer: SyncTimer, began: float) -> dict[str, float]:
    """Return the seconds of each part of a publication. "send" is the time that no other part has used."""
    return timer.seconds | {"send": time.monotonic() - began - sum(timer.seconds.values())}


def carrier_class(name: str) -> type[FolderCarrier]:
    """Return the class of the carrier that `rollout.weight_sync` names.

    Raises:
        MissingPlugin: no plug-in provides it.
    """
    return FolderCarrier if name == FOLDER_CARRIER else load("weight carrier", name, "rollout.weight_sync")
