"""Checks of the options of partial rollouts."""

from __future__ import annotations

from collections.abc import Iterator

from training.options.rl_options import RLOptions


def faults(config: RLOptions) -> Iterator[str]:
    """Yield the reasons why groups cannot continue in the next step."""
    if config.filter_range:
        yield (
            f"{config.FILTER_OPTION} replaces prompts within a step, but asynchronous.partial_rollout moves prompts "
            "to the next step; unset one of them"
        )
