"""Comparison of the records of two runs: the first step, quantity and place in which they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from components.batch import Batch
from components.batch.reading import load_batch
from components.registry import load
from plugins.replay.digests import read_digests
from training.tracking.serialization import flat, json_lines, json_object
from training.tracking.tracker import ROLLOUTS

GENERATED = (
    ("data order", ("prompt_id", "sample_id")),
    ("prompt tokens", ()),
    ("responses", ("tokens", "action_mask", "truncated", "num_turns")),
    ("log-probabilities of the engine", ("rollout_logprob",)),
    ("rewards", ("reward", "score")),
)
"""Quantities that generation and scoring produce, in the order in which they are computed, with their columns."""
TRAINED = (
    ("log-probabilities", ("logprob",)),
    ("log-probabilities of the reference", ("reference_logprob",)),
    ("values", ("value",)),
    ("advantages", ("shaped_reward", "correction", "return", "advantage")),
)
"""Quantities that a training step computes before the update."""
UNRELATED = (
    *("timing_s/", "timing_per_token_ms/", "perf/", "bound/", "eval/", "val-"),
    *("rollout/filter_", "rollout/queued_batches", "reward/failed"),
)
"""Beginnings of the names of metrics that do not follow from the rollouts of a step: times, evaluations, and counts of
what was generated and not trained on."""
ENVIRONMENT = ("python", "platform", "cpu_count", "omp_num_threads", "packages", "git", "hardware")
"""Fields of environment.json that can change numbers."""


@dataclass(frozen=True)
class Difference:
    """A quantity of a step that differs between two runs."""

    step: int
    quantity: str
    """Kind of the quantity, such as "advantages"."""
    name: str
    """Column, metric or role."""
    detail: str
    """Values of both runs at the first place that differs, and the largest difference."""

    def __str__(self) -> str:
        return f"step {self.step}: {self.quantity} differ: {self.name} {self.detail}"


def differences(first: Path, second: Path, step: int) -> Iterator[Difference]:
    """Yield all differences of a step, in the order in which its quantities are computed.

    Args:
        first: folder of a run.
        second: folder of another run.
        step: number of the step, from 1.
    """
    first_batch = stored_batch(first, step)
    second_batch = stored_batch(second, step)
    if first_batch is not None and second_batch is not None:
        yield from _of_batches(first_batch, second_batch, step)
    yield from _of_metrics(metrics_of(first, step), metrics_of(second, step), step)
    digests = [
        {role: digest for (at, role), digest in read_digests(run).items() if at == step} for run in (first, second)
    ]
    for role in digests[0]:
        if role in digests[1] and digests[0][role] != digests[1][role]:
            yield Difference(step, "weights", role, f"have the digests {digests[0][role]} and {digests[1][role]}")


def stored_batch(run: Path, step: int) -> Batch | None:
    """Return the stored batch of a step, or None if there is none."""
    path = run / ROLLOUTS.format(step=step)
    return load_batch(path) if path.is_file() else None


def metrics_of(run: Path, step: int) -> dict[str, Any]:
    """Return the metrics that a run has logged for a step. A repeated step counts with its last line."""
    metrics: dict[str, Any] = {}
    for line in json_lines(run / "metrics.jsonl"):
        if line.get("step") == step:
            metrics = line
    for name in metrics.pop("nonfinite", ()):
        metrics[name] = math.nan
    return {name: value for name, value in metrics.items() if name not in ("step", "time")}


def logged_steps(run: Path) -> list[int]:
    """Return the numbers of the training steps that a run has logged, in order."""
    return sorted({line["step"] for line in json_lines(run / "metrics.jsonl") if line.get("step")})


def config_changes(first: Path, second: Path) -> list[str]:
    """Describe the options that differ between two runs, one line each: "train.learning_rate: 1e-06 -> 2e-06"."""
    configs = [yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")) for run in (first, second)]
    return load("checkpoint reader", "changes")(*configs)


def environment_changes(first: Path, second: Path) -> list[str]:
    """Describe the versions, settings and hardware that differ between the newest starts of two runs."""
    before, after = (
        flat({name: value for name, value in json_object(run / "environment.json").items() if name in ENVIRONMENT})
        for run in (first, second)
    )
    names = dict.fromkeys([*before, *after])
    return [f"{name}: {before.get(name)} -> {after.get(name)}" for name in names if before.get(name) != after.get(name)]


# --- parts of a step


def _of_batches(first: Batch, second: Batch, step: int) -> Iterator[Difference]:
    if len(first) != len(second):
        yield Difference(step, "responses", "count", f"is {len(first)} and {len(second)}")
        return
    for quantity, columns in GENERATED:
        if quantity == "prompt tokens":
            yield from _of_prompts(first, second, step)
            continue
        yield from _of_columns(first, second, step, quantity, columns)
    # Token columns of responses with different lengths cannot be compared entry by entry.
    if not torch.equal(first.lengths, second.lengths):
        return
    for quantity, columns in TRAINED:
        yield from _of_columns(first, second, step, quantity, columns)


def _of_prompts(first: Batch, second: Batch, step: int) -> Iterator[Difference]:
    if "prompt_length" not in first or "prompt_length" not in second:
        return
    lengths = first["prompt_length"].tolist(), second["prompt_length"].tolist()
    rows = first.lists("tokens"), second.lists("tokens")
    for row in range(len(first)):
        prompts = [tokens[row][: length[row]] for tokens, length in zip(rows, lengths, strict=True)]
        if prompts[0] != prompts[1]:
            place = _first_unequal(*prompts)
            yield Difference(step, "prompt tokens", "tokens", f"of response {row} differ from token {place}")
            return


def _of_columns(first: Batch, second: Batch, step: int, quantity: str, names: Sequence[str]) -> Iterator[Difference]:
    for name in names:
        if name not in first or name not in second or first[name].shape != second[name].shape:
            if name == "tokens" and not torch.equal(first.lengths, second.lengths):
                row = int((first.lengths != second.lengths).nonzero()[0])
                counts = f"{int(first.lengths[row])} and {int(second.lengths[row])}"
                yield Difference(step, quantity, name, f"of response {row} have the lengths {counts}")
            continue
        unequal = unequal_entries(first[name], second[name])
        if bool(unequal.any()):
            yield Difference(step, quantity, name, _difference_text(first, name, second[name], unequal))


def unequal_entries(first: Tensor, second: Tensor) -> Tensor:
    """Return True for each entry of two tensors that differs. NaN equals NaN."""
    unequal = first != second
    if first.dtype.is_floating_point:
        unequal &= ~(first.isnan() & second.isnan())
    return unequal


def _difference_text(batch: Batch, name: str, second: Tensor, unequal: Tensor) -> str:
    """Describe the first entry of a column that differs, and the largest difference."""
    first = batch[name]
    index = int(unequal.reshape(len(unequal), -1).any(1).nonzero()[0])
    place = f"of response {index}"
    if name in batch.per_token:
        row = int(batch.sequence_ids[index])
        place = f"of response {row}, token {index - int(batch.offsets[row])}"
    gap = (first.double() - second.double()).abs().nan_to_num(0).max()
    values = f"{first[index].tolist()!r} and {second[index].tolist()!r}"
    return f"{place} is {values}; {int(unequal.sum())} of {unequal.numel()} entries differ, by at most {float(gap):.3g}"


def _of_metrics(first: Mapping[str, Any], second: Mapping[str, Any], step: int) -> Iterator[Difference]:
    for name in first:
        if name not in second or name.startswith(UNRELATED):
            continue
        both_nan = all(isinstance(value, float) and math.isnan(value) for value in (first[name], second[name]))
        if first[name] != second[name] and not both_nan:
            yield Difference(step, "metrics", name, f"is {first[name]!r} and {second[name]!r}")


def _first_unequal(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the index of the first entry that differs. If one sequence begins with the other, it is its length."""
    for index, (a, b) in enumerate(zip(first, second)):
        if a != b:
            return index
    return min(len(first), len(second))
