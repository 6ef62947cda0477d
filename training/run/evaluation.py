"""How good a policy is on held-out prompts over a run: at its start, now and then, at its end.

B responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from components.batch import Batch
from components.data.samples import for_samples
from components.generate.config import SamplingConfig
from components.rewards.errors import RewardError
from training.run.evaluation_metrics import best_metric, heldout_metrics


@dataclass(kw_only=True)
class Evaluation:
    """Scores held-out prompts, and remembers the first scores, the last ones and which step was the best.

    Without prompts everything is empty, so that a loop need not ask whether there are any.
    """

    prompts: Batch | None
    """As `PromptSource.take` gives them."""
    response: Callable[[Batch, SamplingConfig], Batch]
    """(prompts with `sample_id`, sampling) -> one scored response to each, without those whose reward failed, with
    `action_mask`, `score`, `prompt_id`, `datasource`, `truncated` and any `log_...`. It should draw the same random
    numbers every time.
    """
    sampling: SamplingConfig
    samples_per_prompt: int
    best_metric_key: str
    """See `best_metric`."""
    info: Callable[[str], None]
    """Shows a line to the user."""
    greedy: bool = False
    """Whether the likeliest response to each prompt is scored too, as `eval/score_greedy`."""
    further: Callable[[Batch], Mapping[str, float]] = lambda _: {}
    """Metrics of a recipe's own, of the same responses."""
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    """At the "start", where `start` was called, and at the "end", the last evaluation."""
    step: int = -1
    """The step after which the last evaluation was made; -1: none was."""
    best: tuple[str, float] | None = None
    """Name and value of the best metric so far."""
    best_step: int = 0
    """The step that it is of; 0: the start."""

    def start(self) -> dict[str, float]:
        """Evaluate the policy before it is trained, or where held-out prompts were named for the first time; returns
        metrics, none where that was done before.
        """
        if self.prompts is None or self.scores.get("start"):
            return {}
        self.scores["start"] = self.evaluate()
        self._deciding(self.scores["start"])  # a best_metric_key that is none is found out now
        return self.scores["start"]

    def at_step(self, step: int) -> dict[str, float]:
        """Evaluate after a step; returns metrics."""
        self.scores["end"] = self.evaluate()
        self.step = step
        return self.scores["end"]

    def evaluate(self) -> dict[str, float]:
        """The score and what else `heldout_metrics` says, by source too; the greedy score, where it is asked for; and
        the recipe's own.

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
            greedy, failed_too = self._responses(replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0), 1)
            metrics |= {"score_greedy": float(greedy["score"].mean())}
            failed += failed_too
        metrics["failed"] = float(failed)
        return {f"eval/{name}": value for name, value in metrics.items()} | dict(self.further(responses))

    def _responses(self, sampling: SamplingConfig, count: int) -> tuple[Batch, int]:
        """Make `count` responses to each prompt; returns those that have a reward, and the number of the others."""
        assert self.prompts is not None
        prompts = for_samples(self.prompts, count)
        responses = self.response(prompts, sampling)
        if not len(responses):
            raise RewardError(f"none of {len(prompts)} responses to held-out prompts has a reward")
        return responses, len(prompts) - len(responses)

    def is_best(self, metrics: Mapping[str, float], step: int = 0) -> bool:
        """Whether a step whose metrics these are is the best so far; one that was not evaluated is not."""
        found = self._deciding(metrics) if any(name.startswith("eval/") for name in metrics) else None
        if found is None or (self.best is not None and found[1] <= self.best[1]):
            return False
        self.best, self.best_step = found, step
        return True

    def _deciding(self, metrics: Mapping[str, float]) -> tuple[str, float] | None:
        if self.prompts is None:
            return None
        heldout = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
        return best_metric(heldout, self.best_metric_key)

    def finish(self, step: int) -> dict[str, Any] | None:
        """Say what was gained, and sum it up as `score` of summary.json; None without prompts. What was not scored, at
        the start or greedily, is None.
        """
        if self.prompts is None:
            return None
        # Of the last step it may not have been known that it is the last.
        start, end = self.scores.get("start", {}), self.scores["end"] if self.step == step else self.at_step(step)
        said: list[str] = []
        found: dict[str, Any] = {"examples": len(self.prompts)}
        for name, key, what in (("eval/score", "", "sampled"), ("eval/score_greedy", "_greedy", "greedy")):
            first, last = start.get(name), end.get(name)
            found |= {f"start{key}": first, f"end{key}": last}
            if last is not None:
                said.append(f"{what} {last:.3f}" if first is None else f"{what} {first:.3f} -> {last:.3f}")
        self.info(f"score on {len(self.prompts)} held-out prompts: {', '.join(said)}")
        return found

    def verdict(self, checkpoints: Path) -> str:
        """A line about a run that ends worse than it was at its best or at its start; empty for others.

        Args:
            checkpoints: the folder of the step folders.
        """
        start, end = self.scores.get("start", {}), self.scores.get("end", {})
        last = self._deciding(end) if end else None
        if last is None:
            return ""
        first = self._deciding(start) if start else None
        found = ""
        # The best of step 0 is the model that the run began with, which the next sentence is about.
        if self.best is not None and self.best_step > 0 and self.best[1] > last[1]:
            folder = checkpoints / f"step_{self.best_step}"
            where = f": {folder}/hf" if folder.is_dir() else ", of which there is no checkpoint"
            found = f"the best policy is of step {self.best_step}, {last[0]} {self.best[1]:.3f}{where}"
        if first is not None and last[1] < first[1]:
            found += "; " * bool(found) + (
                f"the end ({last[1]:.3f}) is worse than the start ({first[1]:.3f}): lower train.learning_rate"
            )
        return found

    def state_dict(self) -> dict[str, Any]:
        """Give what `load_state_dict` needs."""
        return {"scores": self.scores, "step": self.step, "best": self.best, "best_step": self.best_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the scores of another run's part."""
        self.scores, self.step = state["scores"], state.get("step", -1)
        self.best = state["best"] and tuple(state["best"])
        self.best_step = state.get("best_step", 0)
