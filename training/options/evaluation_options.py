"""Options of the evaluation of a policy on held-out prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from components.data.sources import check_sources
from components.ranges import Count, CountFromZero, NotNegative, ShareAboveZero
from training.options.data_options import DataOptions
from training.options.run_options import Steps
from training.options.schema import Options, active_when, column_names, errors_of, limit_note


@dataclass(kw_only=True)
class EvaluationOptions(Options, group="evaluation"):
    """Evaluation of the policy on held-out prompts."""

    path: str | None = None
    """Held-out prompts, in the same forms as data.path. A generated task uses the prompts that it reserves for
    evaluation. No evaluation by default."""
    split: str | None = active_when(None, path=True)
    """Split of the held-out data. Default: train, or heldout for a generated task."""
    max_samples: Count | None = active_when(2048, path=True)
    """Maximum number of held-out prompts. null uses all prompts, or 2,048 of a generated task."""
    every: Steps = active_when(-1, path=True)
    """Interval between evaluations, in steps. -1 evaluates only at the start and at the end."""
    greedy: bool = active_when(False, path=True)
    """Also score one greedily decoded response per prompt, logged as eval/score_greedy."""
    at_start: bool = active_when(True, path=True)
    """Evaluate before the first step."""
    temperature: NotNegative = active_when(1.0, path=True)
    """Sampling temperature of the responses behind eval/score. 0 decodes greedily."""
    top_p: ShareAboveZero = active_when(1.0, path=True)
    """Top-p for evaluation: sample from the most likely tokens whose probabilities sum to this value. 1 samples from
    the full vocabulary."""
    top_k: CountFromZero = active_when(0, path=True)
    """Top-k for evaluation. 0 samples from the full vocabulary."""
    samples_per_prompt: Count = active_when(4, path=True)
    """Number of responses sampled per held-out prompt."""
    best_metric: str = active_when("", path=True)
    """Metric that selects the best policy, which is kept and named in checkpoints/best. Default: eval/score. `none`
    keeps only the last policy."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if self.temperature == 0 and self.samples_per_prompt > 1:
            yield "evaluation.temperature=0 always gives the same response; set evaluation.samples_per_prompt=1"
        if self.path is not None:
            yield from errors_of(f"evaluation.path={self.path}: ", check_sources, self.path)

    def is_due(self, step: int, is_last: bool) -> bool:
        """Return True if the policy is evaluated after this step."""
        # The last step always: its scores are those of the exported policy.
        return is_last or (self.every > 0 and step % self.every == 0)

    def rows(self, data: DataOptions, notes: list[str] | None = None) -> list[dict[str, Any]]:
        """Return the held-out prompts, or an empty list without a path.

        They are the same for every seed, so that runs can be compared.

        Args:
            data: options of the training prompts, which name the columns.
            notes: receives the number of prompts that max_samples excludes.
        """
        from components.data.prompts import load_rows

        if self.path is None:
            return []
        # Without the seed of the run and without a mixture: two runs must be scored on the same prompts.
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
