"""Comparison of an engine's log-probabilities with the trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from components.models.layer_marks import first_difference
from plugins.engine_check.probe import Probe

LIMITS = {
    "float32": 5e-4,
    "bfloat16": 0.2,
    "fp8_per_channel": 0.3,
    "fp8": 0.3,
    "fp8_e4m3": 0.3,
    "fp8_e5m2": 0.6,
}
"""Mean absolute difference of log-probabilities in nats that rounding may cause, by the coarsest number format of the
engine. Measured means: in float32 up to 1e-6, with an fp8 cache 0.12, with fp8_e5m2 0.22, and with weights in
fp8_per_channel 0.15 (docs/engines.md). In bfloat16 a tiny random gpt_oss has 0.083, because tokens near a tie of two
experts are routed differently; qwen3_moe has 0.027, mixtral 0.022, qwen2 0.016, and random models of 12 layers 0.012
(qwen3_moe) and 0.027 (qwen2). Its limit is 2.4 times the largest of them."""
MARK_LIMITS = {
    "float32": 1e-3,
    "bfloat16": 0.1,
    "fp8_per_channel": 0.2,
    "fp8": 0.2,
    "fp8_e4m3": 0.2,
    "fp8_e5m2": 0.4,
}
"""Relative difference of a group's output that rounding may cause."""


class EngineMismatch(RuntimeError):
    """Raised when the log-probabilities of engine and trainer differ with the same weights."""


class EngineCheck:
    """Decides when an engine is checked, and compares. One per engine."""

    def __init__(self, every: int, precision: str) -> None:
        """
        Args:
            every: check the first version that the engine receives, and every so many after it.
            precision: coarsest number format of the engine, a key of LIMITS.
        """
        self._every = every
        self._precision = precision
        self._received = 0
        self._is_due = False
        self._probe: Probe | None = None
        self.metrics: dict[str, float] = {}
        """Differences of the last check in nats, and the mean that rounding may cause. `check_due` (1) is added while
        the engine needs a probe for its next check."""

    def received(self) -> None:
        """Count a version that the engine has received. The check of an older version is replaced by one of it."""
        self._is_due = self._is_due or self._received % self._every == 0
        self._received += 1
        self._probe = None
        if self._is_due:
            self.metrics["check_due"] = 1.0

    def next(self, probe: Probe | None, is_asleep: bool) -> Probe | None:
        """Return the probe that is to be compared now, or None.

        Args:
            probe: probe of the version in use. None: there is none since the last call.
            is_asleep: the engine cannot compute now. A check that is due is made once the engine is awake.
        """
        if probe is not None and self._is_due:
            self._probe = probe
            self.metrics.pop("check_due", None)
        if is_asleep or self._probe is None:
            return None
        probe, self._probe = self._probe, None
        self._is_due = False
        return probe

    @staticmethod
    def rows(probe: Probe, positions: int | None) -> list[list[int]]:
        """Return the sequences of a probe, cut to the number of positions of the engine."""
        # One position is reserved: vLLM generates at least one token, which is discarded.
        return [row[: (positions or len(row) + 1) - 1] for row in probe.tokens]

    @staticmethod
    def sampling() -> Any:
        """Return vLLM's `SamplingParams` of a request for the log-probabilities of its prompt."""
        from vllm import SamplingParams

        return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)

    @staticmethod
    def scores(output: Any) -> list[float]:
        """Return the log-probability of each token of a `RequestOutput`'s prompt, except the first."""
        values: list[float] = output.prompt_logprobs.logprobs
        assert len(values) == len(output.prompt_token_ids) - 1, (len(values), len(output.prompt_token_ids))
        return values

    def gap(self, probe: Probe, logprobs: Sequence[Sequence[float]]) -> Tensor:
        """Return the absolute differences of log-probabilities, in nats.

        Args:
            probe: probe of the version in use.
            logprobs: the engine's log-probability of each token except the first. An engine with fewer positions gives
                those of the first tokens only.
        """
        pairs = zip(probe.logprobs, logprobs, strict=True)
        gap_N = torch.cat([torch.tensor(row) - torch.tensor(expected[: len(row)]) for expected, row in pairs]).abs()
        self.metrics = {
            "check_gap_mean": float(gap_N.mean()),
            "check_gap_max": float(gap_N.max()),
            "check_gap_limit": LIMITS[self._precision],
        }
        return gap_N

    def is_explained(self, gap_N: Tensor) -> bool:
        """True if rounding explains the differences. A difference that is not a number is never explained."""
        return bool(gap_N.mean() <= LIMITS[self._precision])

    def error(self, version: int, probe: Probe, gap_N: Tensor, marks: Sequence[dict[str, Tensor]]) -> EngineMismatch:
        """Return the error that ends the run.

        Args:
            version: version of the weights in use.
            probe: its probe.
            gap_N: absolute differences in nats, larger than rounding explains.
            marks: layer marks of the engine by group of layers, for each sequence. Empty if other requests were
                running.
        """
        summary = (
            f"version {version} of the weights has arrived, but the engine does not compute with it what the "
            f"trainer computes: log-probabilities of {len(gap_N)} tokens differ by {gap_N.mean():.2g} nats on average "
            f"(largest: {gap_N.max():.2g}), where {self._precision} explains {LIMITS[self._precision]:g}"
        )
        return EngineMismatch(
            f"{summary}. {self._place(probe, marks)}. Training on its responses would be off-policy; set "
            "rollout.engine=hf, or rollout.check_engine_every=0 to continue without the check"
        )

    def _place(self, probe: Probe, marks: Sequence[dict[str, Tensor]]) -> str:
        """Describe the first group of layers whose output differs."""
        if not marks:
            return "The layers were not compared, as other requests are in flight"
        # The trainer may skip the last token of a sequence, as no token follows it. The engine's marks are cut
        # accordingly.
        lengths = {group: len(mark_NP) // len(probe.tokens) for group, mark_NP in probe.marks.items()}
        actual = {
            group: torch.cat([mark[group][:length] for mark in marks])
            for group, length in lengths.items()
            if all(group in mark for mark in marks)
        }
        if not actual:
            return (
                "The layers could not be compared, as they run in compiled graphs; rollout.enforce_eager=true allows it"
            )
        place = first_difference(probe.marks, actual, MARK_LIMITS[self._precision])
        return f"The first group of layers that differs: {place or 'the output layer (head)'}"
