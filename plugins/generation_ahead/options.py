"""Checks of the options of generation ahead of training."""

from __future__ import annotations

from collections.abc import Iterator

from training.options.rl_options import RLOptions


def faults(config: RLOptions) -> Iterator[str]:
    """Yield the reasons why generation and training cannot run at the same time."""
    options = config.asynchronous
    if options.ahead and config.placement.colocate:
        yield (
            "asynchronous.enabled, but the roles work one after the other on the same devices, so generation and "
            f"training cannot run concurrently; set {config.APART}"
        )
    if options.ahead and config.backend == "local":
        yield "asynchronous.enabled, but backend=local runs one role at a time; set backend=ray"
    least = config.prompts_per_step + 1
    most = 2 * config.prompts_per_step
    if options.in_flight_prompts and not least <= options.in_flight_prompts <= most:
        yield (
            f"asynchronous.in_flight_prompts={options.in_flight_prompts}; set {least} to {most}: more than the "
            f"{config.prompts_per_step} prompts of a step, and at most twice as many"
        )
    if options.ahead and config.placement.takes_turns:
        yield (
            "asynchronous.enabled, but sleeping roles cannot run concurrently; set placement.engines_sleep=false "
            "and placement.learners_sleep=false"
        )
