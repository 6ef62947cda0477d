"""The option that would make a step faster, from the seconds of its phases and the options of the run.

Each piece of advice names one option. It is given only if the phase takes at least `LEAST_SHARE` of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LEAST_SHARE = 0.15
"""Share of a step below which a phase is not worth a change."""
SLOW_REWARD_S = 2e-3
"""Seconds of a worker for each response above which more workers pay for their calls."""
FEW_TOKENS = 4096
"""Tokens of a micro-batch below which the fixed cost of a pass matters."""
GENERATE, TRAIN, REWARD = ("generate", "gen"), ("train", "update_actor"), ("reward",)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One option to change."""

    phase: str
    loss: str
    """Reason, with numbers."""
    option: str
    value: str
    gain_s: float
    """Estimated seconds that a step becomes shorter."""

    def __str__(self) -> str:
        """Return the advice as text."""
        return f"{self.loss}; try {self.option}={self.value}"


def advise(config: Any, seconds: Mapping[str, float], step_tokens: float, cores: int, on_gpu: bool) -> Advice | None:
    """Return the advice with the largest estimated gain, or None.

    Args:
        config: resolved configuration of a recipe that trains a policy on its own rollouts.
        seconds: mean seconds of each phase, and of the whole `step`.
        step_tokens: number of tokens that a step trains on.
        cores: number of cores of the machine.
        on_gpu: True if the run computes on GPUs.
    """
    pieces = [
        *_more_rows(config, seconds),
        *_more_reward_workers(config, seconds, cores),
        *_larger_micro_batches(config, seconds, step_tokens),
        *_no_checkpointing(config, seconds, on_gpu),
        *_generation_ahead(config, seconds, cores),
    ]
    worth = [piece for piece in pieces if piece.gain_s >= 0.05 * seconds["step"]]
    return max(worth, key=lambda piece: piece.gain_s, default=None)


def _taken(seconds: Mapping[str, float], phases: tuple[str, ...]) -> tuple[str, float] | None:
    """Return the phase of a step among `phases` and its seconds, if it takes a large share."""
    for phase in phases:
        if seconds.get(phase, 0.0) >= LEAST_SHARE * seconds["step"]:
            return phase, seconds[phase]
    return None


def _more_rows(config: Any, seconds: Mapping[str, float]) -> Iterator[Advice]:
    """An engine generates its responses in several groups, because its maximum number of rows is lower."""
    rows = math.ceil(config.step_size / (config.placement.rollout_engines or 1))
    most = config.rollout.max_num_seqs
    taken = _taken(seconds, GENERATE)
    if taken is None or not most or most >= rows:
        return
    # Decoding steps cost nearly the same for twice the rows, as long as they are few.
    gain = taken[1] * (1 - most / rows) / 2
    loss = f"{most:,} rows of {rows:,} possible"
    yield Advice(phase=taken[0], loss=loss, option="rollout.max_num_seqs", value=str(rows), gain_s=gain)


def _more_reward_workers(config: Any, seconds: Mapping[str, float], cores: int) -> Iterator[Advice]:
    """Reward code takes long, and has fewer processes than the machine has cores."""
    workers = config.reward.workers
    taken = _taken(seconds, REWARD)
    target = min(cores, config.step_size)
    # A server of rewards has workers of its own.
    if taken is None or workers >= target or "://" in (config.reward.source or ""):
        return
    each = taken[1] * workers / config.step_size
    if each < SLOW_REWARD_S:
        return
    loss = f"{each * 1e3:.0f} ms a response in {workers} of {cores} cores"
    gain = taken[1] * (1 - workers / target)
    yield Advice(phase=taken[0], loss=loss, option="reward.workers", value=str(target), gain_s=gain)


def _larger_micro_batches(config: Any, seconds: Mapping[str, float], tokens: float) -> Iterator[Advice]:
    """Passes have so few tokens that their fixed cost is a large part of them."""
    most = config.train.max_tokens
    taken = _taken(seconds, TRAIN)
    each = tokens * config.train.epochs / config.updates_per_step / (config.placement.actor_ranks or 1)
    if taken is None or config.train.micro_batch_size or not most or most >= min(FEW_TOKENS, each):
        return
    larger = 2 ** math.ceil(math.log2(min(FEW_TOKENS, each)))
    loss = f"{each / most:.0f} passes of {most:,} tokens in each optimizer step"
    gain = taken[1] * (1 - most / larger) / 3
    yield Advice(phase=taken[0], loss=loss, option="train.max_tokens", value=str(larger), gain_s=gain)


def _no_checkpointing(config: Any, seconds: Mapping[str, float], on_gpu: bool) -> Iterator[Advice]:
    """Activations are computed twice. On GPUs the plan decides, because it knows their memory."""
    taken = _taken(seconds, TRAIN)
    if taken is None or on_gpu or not config.train.gradient_checkpointing:
        return
    loss = "activations are computed twice"
    # One of four products of the size of a forward pass.
    yield Advice(phase=taken[0], loss=loss, option="train.gradient_checkpointing", value="false", gain_s=taken[1] / 5)


def _generation_ahead(config: Any, seconds: Mapping[str, float], cores: int) -> Iterator[Advice]:
    """Engines and learners wait for each other, although they have devices of their own."""
    taken = _taken(seconds, GENERATE)
    placement = config.placement
    if taken is None or placement.colocate or config.asynchronous.enabled or cores < 2:
        return
    # These runs are refused with it.
    if config.backend == "local" or placement.takes_turns:
        return
    gain = min(taken[1], seconds["step"] - taken[1])
    loss = "engines and learners wait for each other"
    yield Advice(phase=taken[0], loss=loss, option="asynchronous.enabled", value="true", gain_s=gain)
