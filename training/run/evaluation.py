"""Evaluation of a policy on held-out prompts: at the start of a run, at intervals, and at its end.

B: number of responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from components.batch import Batch
from components.data.samples import for_samples
from components.generate.config import SamplingConfig
from components.rewards.errors import RewardError
from training.run.evaluation_metrics import best_metric, heldout_metrics


@dataclass(kw_only=True)
class Evaluation:
    """Scores the policy on held-out prompts. Keeps the first scores, the last scores and the best step.

    Without held-out prompts all methods return empty results, so a loop can call them unconditionally.
    """

    prompts: Batch | None
    """Held-out prompts, as `PromptSource.take` returns them, or None."""
    response: Callable[[Batch, SamplingConfig], Batch]
    """(prompts with `sample_id`, sampling) -> one scored response per prompt, without those whose reward failed.

    The responses have the columns `action_mask`, `score`, `prompt_id`, `datasource`, `truncated` and any `log_...`. The
    function should use the same random numbers in every call, so that evaluations are comparable.
    """
    sampling: SamplingConfig
    samples_per_prompt: int
    best_metric_key: str
    """Name of the metric that decides the best step; see `best_metric`."""
    info: Callable[[str], None]
    """Prints a line for the user."""
    greedy: bool = False
    """True to also score a greedy response to each prompt, as `eval/score_greedy`."""
    further: Callable[[Batch], Mapping[str, float]] = lambda _: {}
    """Computes additional metrics of a recipe from the same responses."""
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics at the "start" (before training) and at the "end" (the last evaluation)."""
    step: int = -1
    """Step of the last evaluation, or -1 if there was none."""
    best: tuple[str, float] | None = None
    """Name and value of the best metric so far."""
    best_step: int = 0
    """Step of the best metric. 0 is the start."""

    def start(self) -> dict[str, float]:
        """Evaluate the policy before training, or when a resumed run has held-out prompts for the first time.

        Returns:
            Metrics; empty if the start was evaluated before.
        """
        if self.prompts is None or self.scores.get("start"):
            return {}
        self.scores["start"] = self.evaluate()
        # Called for its check: an unknown best_metric_key should fail now, not after the first step.
        self.deciding(self.scores["start"])
        return self.scores["start"]

    def at_step(self, step: int) -> dict[str, float]:
        """Evaluate the policy after a step. Return the metrics."""
        self.scores["end"] = self.evaluate()
        self.step = step
        return self.scores["end"]

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of `heldout_metrics` as `eval/<name>`, the greedy score if enabled, and the recipe's own.

        Raises:
            RewardError: no response has a reward.
        """
        if self.prompts is None:
            return {}
        responses, failed = self._responses(self.sampling, self.samples_per_prompt)
        metrics = heldout_metrics(
            responses["score"],
            responses["prompt_id"],
            responses["datasource"],
            responses.sum_tokens(responses["action_mask"]),
            responses["truncated"],
            {name.removeprefix("log_"): responses[name] for name in responses.names if name.startswith("log_")},
        )
        if self.greedy:
            # One response is enough: greedy decoding returns the same one each time.
            greedy, failed_too = self._responses(replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0), 1)
            metrics |= {"score_greedy": float(greedy["score"].mean())}
            failed += failed_too
        metrics["failed"] = float(failed)
        return {f"eval/{name}": value for name, value in metrics.items()} | dict(self.further(responses))

    def _responses(self, sampling: SamplingConfig, count: int) -> tuple[Batch, int]:
        """Sample `count` responses per prompt. Return those with a reward, and the number of those without."""
        assert self.prompts is not None
        prompts = for_samples(self.prompts, count)
        responses = self.response(prompts, sampling)
        # A mean over no responses would be NaN, and the best step could never change again.
        if not len(responses):
            raise RewardError(f"none of {len(prompts)} responses to held-out prompts has a reward")
        return responses, len(prompts) - len(responses)

    def is_best(self, metrics: Mapping[str, float], step: int = 0) -> bool:
        """Return True if the metrics of a step are the best so far. A step that was not evaluated is never the best."""
        score = self.deciding(metrics)
        # A tie keeps the earlier step, so that its checkpoint need not be written again.
        if score is None or (self.best is not None and score[1] <= self.best[1]):
            return False
        self.best = score
        self.best_step = step
        return True

    def deciding(self, metrics: Mapping[str, float]) -> tuple[str, float] | None:
        """Return name and value of the metric that decides the best step. None if there was no evaluation."""
        heldout = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
        if self.prompts is None or not heldout:
            return None
        return best_metric(heldout, self.best_metric_key)

    def finish(self, step: int) -> dict[str, Any] | None:
        """Report the change of the scores, and return it as `score` of summary.json. Return None without prompts.

        Scores that were not measured (at the start, or greedy) are None.
        """
        if self.prompts is None:
            return None
        start = self.scores.get("start", {})
        # The data may have ended early, so that the last step was not known to be the last and was not evaluated.
        end = self.scores["end"] if self.step == step else self.at_step(step)
        changes: list[str] = []
        summary: dict[str, Any] = {"examples": len(self.prompts)}
        for name, key, label in (("eval/score", "", "sampled"), ("eval/score_greedy", "_greedy", "greedy")):
            first = start.get(name)
            last = end.get(name)
            summary |= {f"start{key}": first, f"end{key}": last}
            if last is not None:
                measured = [f"{score:.3f}" for score in (first, last) if score is not None]
                changes.append(f"{label} {' -> '.join(measured)}")
        self.info(f"score on {len(self.prompts)} held-out prompts: {', '.join(changes)}")
        return summary

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`."""
        return {"scores": self.scores, "step": self.step, "best": self.best, "best_step": self.best_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scores of the run before a resume."""
        self.scores = state["scores"]
        self.step = state.get("step", -1)
        # JSON has no tuples, so the pair comes back as a list.
        self.best = state["best"] and tuple(state["best"])
        self.best_step = state.get("best_step", 0)
