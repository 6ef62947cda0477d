"""Options of the curriculum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from components.ranges import Range
from training.options.schema import Options

if TYPE_CHECKING:
    from training.options.rl_options import RLOptions

Share = Annotated[float, Range(least=0, most=1)]
"""Number from 0 to 1."""


@dataclass(kw_only=True)
class CurriculumOptions(Options, group="curriculum", plugin="curriculum"):
    """Selection of prompts by their difficulty (data.curriculum)."""

    decay: Share = 0.5
    """Weight of the previous mean score when a prompt is drawn again. 0 keeps the newest score only."""
    floor: Share = 0.02
    """With data.curriculum=variance: minimum weight of a prompt. The largest possible p (1 - p) is 0.25."""
    shares: tuple[float, float, float] = (0.2, 0.6, 0.2)
    """With data.curriculum=pools: shares of easy, middle and hard prompts in a step. They sum to 1. Prompts that were
    never drawn count as middle."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if min(self.shares) < 0 or not math.isclose(sum(self.shares), 1):
            yield f"curriculum.shares={list(self.shares)} must be three numbers of at least 0 that sum to 1"


def faults(config: RLOptions) -> Iterator[str]:
    """Yield a message for each option that also decides which prompts a step has."""
    selected = f"data.curriculum={config.data.curriculum}"
    settings, defaults = vars(config)["curriculum"], CurriculumOptions()
    unread = {"variance": "shares", "pools": "floor"}[config.data.curriculum]
    if getattr(settings, unread) != getattr(defaults, unread):
        yield f"{selected} does not read curriculum.{unread}; unset it"
    if config.filter_range is not None:
        yield f"{selected} and {config.FILTER_OPTION} both select prompts; unset one of them"
    if config.asynchronous.partial_rollout:
        yield f"{selected} needs complete groups of responses in each step; unset asynchronous.partial_rollout"
    if not config.data.shuffle:
        yield f"{selected} draws the prompts of each step, so data.shuffle=false has no effect; unset one of them"
    if config.rollout.replay_from:
        yield f"{selected} has no effect on stored rollouts; unset it, or rollout.replay_from"
