"""Choice of automatic options: see `training.launch.plan.Choose`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from components.generate.paged_config import PagedRolloutConfig
from plugins.choices.candidates import LEAST_ROWS, Candidate
from plugins.choices.search import (
    RECOMPUTES,
    ROWS,
    SHARE,
    SLEEPS,
    SPARE_CACHE_BYTES,
    STAGE,
    TOKEN_LIMIT,
    Search,
    value_of,
    with_options,
)
from training.launch.plan import Plan, short_value

AUTOMATIC = (SLEEPS, RECOMPUTES, STAGE, TOKEN_LIMIT, ROWS, SHARE)
"""Options that are chosen if they are None."""


def choose(plan: Plan, requested: Any, replan: Callable[[Any], Plan]) -> Plan:
    """Choose the automatic options of a run on GPUs. A run on CPUs keeps its plan."""
    if plan.job.device_type != "GPU" or plan.memory is None:
        return plan
    names = automatic_options(plan, requested)
    if not names:
        return plan
    search = Search(plan=plan, requested=requested, replan=replan, names=names)
    if not search.is_known:
        reason = "the least memory, because the size of a model or of a GPU is not known here"
        plan.chosen = [f"{', '.join(assignments(plan, names))}: {reason}"]
        return plan
    best = search.best()
    if best is None:
        # The plan shows the verdict on these values. It refuses the run only if the minimum does not fit either.
        plan = replan(with_options(requested, search.values(search.domains().least)))
        plan.chosen = [f"{', '.join(assignments(plan, names))}: the least memory, because nothing faster fits"]
        return plan
    chosen = search.plan_of(best)
    assert chosen is not None
    chosen.chosen = list(reasons(search, best, chosen))
    return chosen


def automatic_options(plan: Plan, requested: Any) -> list[str]:
    """Return the names of the options on `auto` that have an effect in this run."""
    config = plan.config
    names = [name for name in AUTOMATIC if _has(config, name) and value_of(requested, name) is None]
    engines = [use.config for use in plan.models if isinstance(use.config, PagedRolloutConfig)]
    # Engines that cannot sleep, or have separate GPUs, stay awake.
    if not value_of(config, SLEEPS):
        names = [name for name in names if name != SLEEPS]
    # An engine with separate GPUs uses nearly all of their memory.
    if not engines or not config.placement.shares_devices:
        names = [name for name in names if name != SHARE]
    return names


def _has(config: Any, name: str) -> bool:
    group, _, option = name.partition(".")
    return hasattr(getattr(config, group, None), option)


def assignments(plan: Plan, names: list[str]) -> list[str]:
    """Return each option with its value in the configuration of a plan."""
    return [f"{name}={short_value(value_of(plan.config, name))}" for name in names]


def reasons(search: Search, best: Candidate, plan: Plan) -> Iterator[str]:
    """Yield a sentence per option with the value and the reason."""
    texts = _training_reasons(search, best, plan) | _engine_reasons(search, best)
    for assignment, name in zip(assignments(plan, list(search.names)), search.names, strict=True):
        yield f"{assignment}: {texts[name]}"


def _training_reasons(search: Search, best: Candidate, plan: Plan) -> dict[str, str]:
    domains = search.domains()
    peak = max(pool.most for pool in search.pools(plan))
    used = f"at most {peak / 1e9:.0f} GB of {search.device_bytes / 1e9:.0f} GB are used"
    stored = "it does not fit without recomputation of activations"
    if not best.recomputes:
        stored = f"activations fit in memory, and recomputation would cost about a fifth of the training time ({used})"
    ranks = plan.job.placement.processes[search.trained.role]
    gathered = "parameters and gradients fit whole during a step, and 3 would gather layers more often"
    if best.stage == 3:
        gathered = "whole parameters and gradients do not fit on a GPU, so each layer is gathered for its pass"
    elif ranks == 1:
        gathered = "parameters and gradients fit whole during a step, and there is one rank, so 3 would save little"
    larger = [number for number in domains.tokens if number > best.tokens]
    tokens = f"the largest micro-batch that is worthwhile ({used})"
    if larger:
        tokens = f"{larger[-1]} tokens do not fit"
    return {RECOMPUTES: stored, STAGE: gathered, TOKEN_LIMIT: tokens}


def _engine_reasons(search: Search, best: Candidate) -> dict[str, str]:
    if search.engine is None:
        return {}
    sleeps = "engines and training fit in memory together, which saves a reload per step"
    if best.sleeps:
        sleeps = "engines and training do not fit in memory together"
    longest = search.plan.longest
    # Rounded up: the engine with the most sequences decides when a step ends.
    of_step = -(-search.engine.sequences // search.engine_processes)
    rows = f"an engine generates {of_step} sequences per step"
    if best.rows < min(search.domains().rows[0], of_step):
        rows = f"the cache holds {best.rows} sequences of {longest} tokens, more do not fit"
        if best.rows < LEAST_ROWS:
            rows += "; most sequences are shorter"
    elif of_step > best.rows:
        rows += f", and more than {best.rows} at a time would not be faster with this model"
    texts = {SLEEPS: sleeps, ROWS: rows}
    if (memory := search.engine_memory(best)) is not None:
        parts = {"weights": memory.weights, "passes": memory.passes, "CUDA": memory.base, "margin": SPARE_CACHE_BYTES}
        sizes = ", ".join(f"{name} {count / 1e9:.1f} GB" for name, count in parts.items())
        cache = f"{memory.cache / 1e9:.1f} GB for {min(best.rows, of_step)} sequences of {longest} tokens"
        texts[SHARE] = f"{sizes}, and a key-value cache of {cache}"
    return texts
