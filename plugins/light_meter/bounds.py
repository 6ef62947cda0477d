"""Lower bounds of the seconds of each phase, from operations, bytes, and the peaks of the machine.

A bound assumes that nothing else happens: one batch with all responses of an engine, products at the measured peak, and
memory that is read once. No run reaches it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from plugins.light_meter.work import Lengths, Work, phases
from training.run.checkpoint_size import checkpoint_bytes

SYNC = ("sync", "update_weights")
CHECKPOINT = ("checkpoint", "save_checkpoint")
WIDTH = {"fp32": 4, "bf16": 2, "bf16_autocast": 4}
"""Bytes of a weight in the engine hf by training precision."""
_DTYPE = {"fp32": "float32", "bf16": "bfloat16", "bf16_autocast": "bfloat16"}
_OPTIMIZER_BYTES = 28
"""Bytes of AdamW per parameter: weight, gradient and two moments are read, and three of them written, in float32."""


class Speed(Protocol):
    """Speed of a machine, as the plug-in `machine_speed` provides it."""

    @property
    def source(self) -> str:
        """`measured` or `table`."""
        ...

    @property
    def host_copy(self) -> float:
        """Bytes per second of a copy in host memory."""
        ...

    @property
    def disk(self) -> float:
        """Bytes per second of a write to the disk."""
        ...

    @property
    def network(self) -> float:
        """Bytes per second to another process or GPU."""
        ...

    def peak(self, precision: str, threads: int) -> float:
        """Return operations per second of large products."""
        ...

    def bandwidth(self, working_set: float, threads: int) -> float:
        """Return bytes per second of memory."""
        ...

    def passes(self, kind: str, threads: int) -> Any:
        """Return the measured passes of a kind, or None."""
        ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A run's work and the speed of its machine, from which the bounds of its steps follow."""

    config: Any
    speed: Speed
    threads: int
    """Number of threads of a worker. Without effect on GPUs."""
    work: Mapping[str, list[Work]]
    """Work of each phase."""

    @classmethod
    def of_run(cls, config: Any, speed: Speed, threads: int) -> Limits:
        """Return the limits of a run with a resolved configuration."""
        return cls(config=config, speed=speed, threads=threads, work=phases(config))

    @property
    def peak(self) -> float:
        """Operations per second of a worker."""
        return self.speed.peak(_DTYPE[self.config.train.precision], self.threads)

    @property
    def width(self) -> int:
        """Number of bytes of a weight in the engines."""
        precision = self.config.train.precision
        # vLLM holds its weights in the dtype of products.
        if precision == "bf16_autocast" and self.config.rollout.engine == "vllm":
            return WIDTH["bf16"]
        return WIDTH[precision]

    def bounds(self, lengths: Lengths, took: Mapping[str, float]) -> dict[str, float]:
        """Return the bound of each phase that a step has, in seconds.

        Args:
            lengths: lengths of the responses of the step.
            took: seconds by phase.
        """
        bound_of: dict[str, float] = {}
        for phase in took:
            if phase in SYNC:
                bound_of[phase] = self._sync()
            elif phase in CHECKPOINT:
                bound_of[phase] = checkpoint_bytes(self.config) / self.speed.disk
            elif self.work.get(phase):
                # Roles of a phase compute at the same time if they have devices of their own.
                bound_of[phase] = max(self.seconds(work, lengths) for work in self.work[phase])
        return bound_of

    def seconds(self, work: Work, lengths: Lengths) -> float:
        """Return the bound of the computation of one model."""
        products = work.operations(lengths) / work.ranks / self.peak
        if work.kind == "decode":
            return max(products, self._read(work, lengths))
        if work.kind == "forward":
            return products
        states = work.updates * _OPTIMIZER_BYTES * work.size.parameters / work.ranks
        return products + states / self._bandwidth(states)

    def _read(self, work: Work, lengths: Lengths) -> float:
        """Return the seconds in which an engine reads its weights for each token, and the cache for each row."""
        size = work.size
        weights = self.width * size.parameters
        cache = 2 * size.layers * size.keys * self.width
        # Each decoding step reads the weights once, whatever the number of rows.
        total = lengths.longest * weights + cache * lengths.pairs / work.ranks
        return total / self._bandwidth(weights)

    def _sync(self) -> float:
        """Return the seconds in which the weights are written once and read once."""
        if not self.work:
            return 0.0
        nbytes = self.width * self.work["generate"][0].size.parameters
        rate = {"broadcast": self.speed.network, "tcp": self.speed.network}
        if self.config.rollout.weight_sync == "ipc":
            return 2 * nbytes / self._bandwidth(nbytes)
        return 2 * nbytes / (rate.get(self.config.rollout.weight_sync) or self.speed.host_copy)

    def _bandwidth(self, working_set: float) -> float:
        return self.speed.bandwidth(working_set, self.threads)
