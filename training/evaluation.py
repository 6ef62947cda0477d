"""How good a policy is on held-out prompts over a run: at its start, now and then, at its end.

B responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from components.batch import Batch
from components.data.samples import for_samples
from components.engines.config import SamplingConfig
from training.evaluation_metrics import best_metric, heldout_metrics
from training.tracking import console_line

SCORES = (("eval/score", 1.0), ("eval/score_greedy", 0.0))
"""The two scores of every run, and the temperature of the responses behind each."""


@dataclass(kw_only=True)
class Evaluation:
    """Scores held-out prompts, and remembers the first scores, the last ones and which step was the best.

    Without prompts everything is empty, so that a loop need not ask whether there are any.
    """

    prompts: Batch | None
    """As `PromptSource.take` gives them."""
    response: Callable[[Batch, SamplingConfig], Batch]
    """(prompts with `sample_id`, sampling) -> one scored response to each, with `action_mask`, `score`, `prompt_id`,
    `datasource`, `truncated` and any `log_...`. It should draw the same random numbers every time.
    """
    sampling: SamplingConfig
    """Of the responses behind pass1 and passN."""
    samples_per_prompt: int
    """N."""
    best_metric_key: str
    """See `best_metric`."""
    info: Callable[[str], None]
    """Shows a line to the user."""
    further: Callable[[Batch], Mapping[str, float]] = lambda _: {}
    """Metrics of a recipe's own, of the responses behind pass1 and passN."""
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    """At the "start", where `start` was called, and at the "end", the last evaluation."""
    best: tuple[str, float] | None = None
    """Name and value of the best metric so far."""

    def start(self, step: int) -> None:
        """Score the policy before it is trained, or where held-out prompts were named for the first time."""
        if self.prompts is None or self.scores.get("start"):
            return
        self.scores["start"] = self.score() | self.evaluate()
        self._deciding(self.scores["start"])  # a best_metric_key that is none is found out now
        when = f"as it was resumed after step {step}" if step else "before training"
        self.info(f"{when}: {console_line(step, shown(self.scores['start']))}")

    def at_step(self, is_last: bool) -> dict[str, float]:
        """Evaluate in the middle of a run, or at its last step; returns metrics."""
        self.scores["end"] = self.evaluate() | (self.score() if is_last else {})
        return self.scores["end"]

    def score(self) -> dict[str, float]:
        """Mean score, sampled at temperature 1 and greedy."""
        if self.prompts is None:
            return {}
        usual = replace(self.sampling, top_p=1.0, top_k=0)
        drawn = {name: replace(usual, temperature=temperature) for name, temperature in SCORES}
        return {name: float(self.responses(sampling, 1)["score"].mean()) for name, sampling in drawn.items()}

    def evaluate(self) -> dict[str, float]:
        """pass1 and passN, by source (see `heldout_metrics`), and the recipe's own."""
        if self.prompts is None:
            return {}
        responses = self.responses(self.sampling, self.samples_per_prompt)
        metrics = heldout_metrics(
            responses["score"],
            responses["prompt_id"],
            responses["datasource"],
            responses.sum_tokens(responses["action_mask"]),
            responses["truncated"],
            {name.removeprefix("log_"): responses[name] for name in responses.names if name.startswith("log_")},
        )
        return {f"eval/{name}": value for name, value in metrics.items()} | dict(self.further(responses))

    def responses(self, sampling: SamplingConfig, count: int) -> Batch:
        """`count` scored responses to each prompt."""
        assert self.prompts is not None
        return self.response(for_samples(self.prompts, count), sampling)

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether a step whose metrics these are is the best so far; one that was not evaluated is not."""
        found = self._deciding(metrics) if any(name.startswith("eval/") for name in metrics) else None
        if found is None or (self.best is not None and found[1] <= self.best[1]):
            return False
        self.best = found
        return True

    def _deciding(self, metrics: Mapping[str, float]) -> tuple[str, float] | None:
        if self.prompts is None:
            return None
        heldout = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
        return best_metric(heldout, self.best_metric_key)

    def finish(self, step: int) -> dict[str, Any] | None:
        """Say what was gained, and sum it up as `score` of summary.json; None without prompts. Where `start` was never
        called, what that would have scored is None.
        """
        if self.prompts is None:
            return None
        start, end = self.scores.get("start", {}), self.scores.get("end", {})
        if "eval/score" not in end:  # the run ended at a step that was not known to be its last
            end = self.scores["end"] = self.score() | self.evaluate()
        self.info(f"after training: {console_line(step, shown(end))}")
        sampled, greedy = (
            f"{start[name]:.3f} -> {end[name]:.3f}" if start else f"{end[name]:.3f}" for name, _ in SCORES
        )
        self.info(f"score on {len(self.prompts)} held-out prompts: sampled {sampled}, greedy {greedy}")
        names = {"start": start.get("eval/score"), "start_greedy": start.get("eval/score_greedy")}
        names |= {"end": end["eval/score"], "end_greedy": end["eval/score_greedy"]}
        return names | {"examples": len(self.prompts)}

    def state_dict(self) -> dict[str, Any]:
        """Give what `load_state_dict` needs."""
        return {"scores": self.scores, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the scores of another run's part."""
        self.scores = state["scores"]
        self.best = state["best"] and tuple(state["best"])


def shown(metrics: Mapping[str, float]) -> dict[str, float]:
    """What a line for people shows of an evaluation."""
    ends = tuple(name for name, _ in SCORES)
    evals = {name: value for name, value in metrics.items() if name.startswith("eval/")}
    return {name: value for name, value in evals.items() if name in ends or "_pass" in name}
