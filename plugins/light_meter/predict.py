"""Expected seconds of a step before a run starts, from the speed of small models in the engines of this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.registry import find
from plugins.light_meter.bounds import SYNC, Limits
from plugins.light_meter.work import Lengths, Work
from training.launch.plan import Plan
from training.tracking.serialization import json_lines

CALL_S = 4e-3
"""Seconds of a call to a role with its batch, without the computation of the role: the median of the demonstration of
grpo on two cores."""
LOOP_S = 8e-3
"""Seconds of a step outside of its phases, measured there as well: advantages, metrics and files."""
REWARD_S = 1e-5
"""Seconds of a rule-based reward, for each response."""
READ_PROMPTS = 100
"""Number of prompts that are tokenized for their mean length."""
_LENGTH = ("rollout/response_length", "response_length/mean")
"""Names of the mean length of responses, ours and verl's."""
MEASURED_HIDDEN = 64
"""Hidden size of the model with which the seconds of a logit were measured."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Expected seconds of the phases of a step."""

    seconds: Mapping[str, float]
    """Seconds by phase, with `other`."""
    tokens: float
    """Number of tokens that a step trains on."""
    assumption: str
    """Lengths of prompts and responses, as text."""
    is_bound: bool = False
    """True if the seconds are lower bounds, because the engines were not measured."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Number of tokens that are trained on per second."""
        return self.tokens / self.step_s

    def line(self, steps: int | None) -> str:
        """Return the prediction as text for a run of `steps` steps."""
        parts = ", ".join(f"{name} {value:.2g}" for name, value in self.seconds.items() if value)
        qualifier = "about"
        if self.is_bound:
            qualifier = "at least"
        text = f"speed     {qualifier} {self.step_s:.2g} s a step ({parts}), {self.tokens_per_second:,.0f} tokens/s"
        if steps:
            text += f", {steps * self.step_s:,.0f} s for {steps} steps"
        return f"{text}; {self.assumption}"

    def fields(self) -> dict[str, Any]:
        """Return the prediction as fields of the plan's JSON."""
        fields = {"step_s": self.step_s, "tokens_per_second": self.tokens_per_second, "phases": dict(self.seconds)}
        return {"speed": {**fields, "assumption": self.assumption, "is_bound": self.is_bound}}


def predicted(command: Any, plan: Plan) -> Prediction | None:
    """Predict the time of a step of a planned run, or return None if the machine or the model is not known.

    Args:
        command: command of the recipe. It reads the prompts.
        plan: plan of the run.
    """
    config = plan.config
    cached = find("machine speed", "cached")
    if cached is None or not hasattr(config, "samples_per_prompt"):
        return None
    speed = cached(plan.job.device_type == "GPU")
    if speed is None:
        return None
    threads = [host.threads for host in plan.job.placement.hosts if "TRAINER" not in dict(host.workers)]
    limits = Limits.of_run(config, speed, max([1, *threads]))
    if not limits.work:
        return None
    prompt = _prompt_tokens(command, config)
    response, source = _response_tokens(config)
    lengths = Lengths.assumed(
        prompts=config.prompts_per_step,
        samples=config.samples_per_prompt,
        prompt=prompt,
        response=response,
        longest=config.rollout.max_new_tokens,
    )
    assumption = f"with {prompt:.0f} tokens a prompt and {response:.0f} a response ({source})"
    return Prediction(
        seconds=phase_seconds(limits, lengths, _phases(plan)),
        tokens=lengths.prompt_tokens + lengths.response_tokens,
        assumption=assumption,
        is_bound=speed.passes("train", limits.threads) is None,
    )


def phase_seconds(limits: Limits, lengths: Lengths, names: list[str]) -> dict[str, float]:
    """Return the expected seconds of each phase. Without measured engines they are the bounds."""
    if limits.speed.passes("train", limits.threads) is None:
        return limits.bounds(lengths, dict.fromkeys(names, 0.0))
    seconds: dict[str, float] = {}
    # Without processes of their own, the roles compute one after the other.
    cores = 1.0
    if limits.config.backend != "local":
        cores = len(os.sched_getaffinity(0)) / limits.threads
    for name in names:
        if name in SYNC:
            seconds[name] = limits.bounds(lengths, {name: 0.0})[name] + 2 * CALL_S
        elif work := limits.work.get(name):
            each = [(_expected(limits, one, lengths), one.ranks) for one in work]
            # Roles with processes of their own compute at the same time, as far as there are cores.
            shared = sum(value * ranks for value, ranks in each) / cores
            seconds[name] = max(*(value for value, _ in each), shared) + CALL_S
    seconds["reward"] = REWARD_S * lengths.rows
    seconds["other"] = LOOP_S
    return seconds


def _expected(limits: Limits, work: Work, lengths: Lengths) -> float:
    """Return the expected seconds of the computation of one model."""
    if work.kind == "decode":
        return _generation(limits, work, lengths)
    passes = limits.speed.passes(work.kind, limits.threads)
    updates = work.updates
    tokens = lengths.computed_tokens * work.epochs / work.ranks / updates
    logits = lengths.response_tokens * work.epochs / work.ranks / updates * work.size.vocabulary
    if not work.has_head:
        logits = 0.0
    micro = max(1, math.ceil(tokens / (limits.config.train.max_tokens or tokens)))
    each = passes.seconds(
        parameters=_layer_parameters(work), layers=work.size.layers, tokens=tokens / micro, logits=logits / micro
    )
    attention = 4 * work.size.layers * work.size.queries * lengths.pairs * work.epochs / work.ranks
    head = 2 * (work.size.hidden - MEASURED_HIDDEN) * logits * updates
    return updates * micro * each + work.products * (attention + max(head, 0)) / limits.peak


def _generation(limits: Limits, work: Work, lengths: Lengths) -> float:
    """Return the expected seconds in which the engines generate all responses."""
    size = work.size
    rows = math.ceil(lengths.rows / work.ranks)
    groups = math.ceil(rows / limits.config.rollout.max_num_seqs)
    # Rows leave a group soon after their last token.
    active = lengths.response_tokens / lengths.longest / work.ranks / groups
    decode = limits.speed.passes("decode", limits.threads)
    shape = {"parameters": _layer_parameters(work), "layers": size.layers}
    token = decode.seconds(**shape, tokens=active, logits=active * size.vocabulary)
    head = 2 * max(size.hidden - MEASURED_HIDDEN, 0) * active * size.vocabulary / limits.peak
    prompts = lengths.distinct_prompt_tokens / work.ranks / groups
    prefill = limits.speed.passes("forward", limits.threads).seconds(**shape, tokens=prompts, logits=0.0)
    cache = 2 * size.layers * size.keys * limits.width * lengths.pairs / work.ranks
    # Keys and values of earlier tokens are read once for each new token.
    read = cache / limits.speed.bandwidth(cache / lengths.longest, limits.threads)
    return groups * (prefill + lengths.longest * (token + head)) + read


def _layer_parameters(work: Work) -> int:
    return (work.size.parameters - work.size.rest) // work.size.layers


def _phases(plan: Plan) -> list[str]:
    """Return the names of the phases of a recipe. Those of verl and OpenRLHF have a phase for each model or for all."""
    config = plan.config
    if hasattr(config.algorithm, "bypass"):
        names = ["gen", "values", "update_critic", "update_actor", "update_weights"]
        if config.needs_reference:
            names.append("ref")
        if not config.algorithm.bypass:
            names.append("old_log_prob")
        return names
    if hasattr(config, "needs_critic"):
        return ["generate", "experience", "train", "sync"]
    return ["generate", "logprobs", "train", "sync"]


def _prompt_tokens(command: Any, config: Any) -> float:
    """Return the mean number of tokens of the first prompts, or the maximum if they cannot be read here."""
    names = [name.strip() for name in config.data.path.split(",")]
    is_local = all(":" in name or Path(name).expanduser().exists() for name in names)
    if not is_local or not Path(config.model.path).expanduser().exists():
        return float(config.data.max_prompt_tokens or 0)
    rows = command.rows(config)[:READ_PROMPTS]
    prompts = config.data.source(rows, config.model.tokenizer(), config.seed, False)
    return float(prompts.take(len(prompts)).lengths.double().mean())


def _response_tokens(config: Any) -> tuple[float, str]:
    """Return the mean number of tokens of a response and its source: the record of `run_dir`, or the maximum."""
    last = 0.0
    path = Path(config.run_dir) / "metrics.jsonl"
    if path.is_file():
        for record in json_lines(path):
            last = float(next((record[name] for name in _LENGTH if name in record), last))
    if last:
        return last, f"measured in {config.run_dir}"
    return float(config.rollout.max_new_tokens), "the maximum; run_dir=RUN takes the mean of a run"
