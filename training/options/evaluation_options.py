"""Options of the evaluation of a policy on held-out prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from components.data.columns import column_names
from components.data.sources import check_sources
from components.ranges import Count, CountFromZero, NotNegative, ShareAboveZero
from training.options.data_options import DataOptions
from training.options.run_options import Steps
from training.options.schema import Options, active_when, errors_of, limit_note


@dataclass(kw_only=True)
class EvaluationOptions(Options, group="evaluation"):
    """Evaluation of the policy on held-out prompts."""

    path: str | None = None
    """Held-out prompts, as data.path; of a generated task those that are kept for this. Default: no evaluation."""
    split: str | None = active_when(None, path=True)
    """Which split of it. Default: train; of a task: heldout."""
    max_samples: Count | None = active_when(2048, path=True)
    """How many of them. null: all, of a generated task 2,048."""
    every: Steps = active_when(-1, path=True)
    """Evaluate every so many steps; -1 only at the start and at the end."""
    greedy: bool = active_when(False, path=True)
    """Score the likeliest response to each prompt too, as eval/score_greedy."""
    at_start: bool = active_when(True, path=True)
    """Evaluate before the first step."""
    temperature: NotNegative = active_when(1.0, path=True)
    """Of the responses behind eval/score."""
    top_p: ShareAboveZero = active_when(1.0, path=True)
    """Of the same responses: they are drawn from the likeliest tokens whose probabilities reach this sum."""
    top_k: CountFromZero = active_when(0, path=True)
    """Of the same: from so many likeliest tokens; 0: from all."""
    samples_per_prompt: Count = active_when(4, path=True)
    """N: responses per held-out prompt."""
    best_metric: str = active_when("", path=True)
    """The policy with the best of this metric is kept, and named in checkpoints/best. Default: eval/score; `none` keeps
    only the last policy."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if self.temperature == 0 and self.samples_per_prompt > 1:
            yield "evaluation.temperature=0 gives the same response every time; set evaluation.samples_per_prompt=1"
        if self.path is not None:
            yield from errors_of(f"evaluation.path={self.path}: ", check_sources, self.path)

    def is_due(self, step: int, is_last: bool) -> bool:
        """Whether to evaluate after this step."""
        return is_last or (self.every > 0 and step % self.every == 0)

    def rows(self, data: DataOptions, notes: list[str] | None = None) -> list[dict[str, Any]]:
        """The held-out prompts, none without a path. The same for every seed, so that runs compare. `notes` gets how
        many max_samples leaves out.
        """
        from components.data.prompts import load_rows

        if self.path is None:
            return []
        return load_rows(
            self.path,
            data.prompt_key,
            data.label_key,
            split=self.split,
            heldout=True,
            max_rows=self.max_samples,
            note=limit_note(notes, "evaluation.max_samples"),
            ignored=column_names(data.ignored_columns),
        )
