"""Dynamic sampling: fill a step with prompts that teach something, and ask for others in place of those that do not.

B responses of a batch; the responses to one prompt share its `prompt_id`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from components.batch import Batch
    from components.data.prompts import PromptSource


SAY_EVERY = 10
"""Of so many rounds, one says how far a step is."""


@dataclass(frozen=True, slots=True)
class Filled:
    """What `fill_groups` found."""

    batch: Batch | None
    """The responses to all prompts that were kept, in the order in which they were made; None when there is none."""
    prompts_seen: int
    """Prompts that were asked for: so far the loader has moved on."""
    prompts_kept: int
    """Prompts in the batch."""
    rounds: int
    """How often responses were asked for. The last rounds are of a few prompts each, and engines wait in them."""

    @property
    def metrics(self) -> dict[str, float]:
        """What a step logs of it."""
        return {
            "rollout/filter_pass_rate": self.prompts_kept / max(self.prompts_seen, 1),
            "rollout/filter_prompts_seen": float(self.prompts_seen),
            "rollout/filter_rounds": float(self.rounds),
        }


def fill_groups(
    generate: Callable[[int], Batch],
    wanted: int,
    available: int,
    keep: Callable[[Batch], Tensor],
    *,
    stopped: Callable[[], bool] = lambda: False,
    info: Callable[[str], None] = lambda _: None,
) -> Filled:
    """Ask for responses to as many prompts as are missing, keep what passes, and ask again, until the step is full.

    A round never asks for more prompts than are missing, so there is no surplus to throw away. What was accepted is
    never lost: when the loader runs out, or the run is stopped, the batch holds fewer prompts than wanted.

    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.2, which samples in rounds of full size instead.

    Args:
        generate: makes and scores the responses to the next so many prompts, with a per-sequence column `prompt_id`.
        wanted: prompts of a full step, at least 1.
        available: prompts that the loader still has; no more are asked for.
        keep: [B] bool, True for the responses that stay, the same for all responses to a prompt; such as
            `components.rl.rewards.groups_within` of their scores.
        stopped: asked before each round; once it is true, what there is is given back.
        info: is given how far a step is, every ten rounds.

    Raises:
        ValueError: a number is out of its range; a round brings responses to more or fewer prompts than were asked for,
            or with other columns than the round before; or `keep` does not return a bool [B], or parts the responses to
            a prompt.
    """
    # Not at the top: a plan check imports this without torch.
    from components.batch import Batch

    if wanted < 1:
        raise ValueError(f"wanted={wanted} prompts; ask for at least 1")
    if available < 0:
        raise ValueError(f"available={available} prompts; it is at least 0")
    parts: list[Batch] = []
    seen = kept = rounds = 0
    while kept < wanted and seen < available and not stopped():
        count = min(wanted - kept, available - seen)
        responses = generate(count)
        keep_B = keep(responses)
        kept += _count_kept(responses, keep_B, count)
        seen += count
        rounds += 1
        parts.append(responses.select(keep_B))
        if rounds % SAY_EVERY == 0 and kept < wanted:
            info(f"{kept} of {wanted} prompts pass, after {seen} were tried; {available - seen} are left")
    batch = Batch.concat(parts) if kept else None
    return Filled(batch=batch, prompts_seen=seen, prompts_kept=kept, rounds=rounds)


def _count_kept(batch: Batch, keep_B: Tensor, count: int) -> int:
    """Count the prompts that are kept, of a round that asked for `count`."""
    if str(keep_B.dtype) != "torch.bool" or keep_B.shape != (len(batch),):
        raise ValueError(
            f"keep returned {keep_B.dtype} of shape {list(keep_B.shape)} for {len(batch)} responses; it must be bool "
            "[B]"
        )
    verdicts: dict[int, bool] = {}
    for prompt_id, verdict in zip(batch["prompt_id"].tolist(), keep_B.tolist(), strict=True):
        if verdicts.setdefault(prompt_id, verdict) != verdict:
            raise ValueError(
                f"keep parts the responses to prompt {prompt_id}; it must be True for all responses to a prompt or "
                "for none"
            )
    if len(verdicts) != count:
        raise ValueError(
            f"generate({count}) brought responses to {len(verdicts)} prompts; it must answer the next {count}, and "
            "give all responses to a prompt the same prompt_id"
        )
    return sum(verdicts.values())


class PromptFilter:
    """Fills each step with prompts that teach something, to the end of the data."""

    def __init__(
        self,
        prompts: PromptSource,
        low: float | None = None,
        high: float | None = None,
        *,
        option: str,
        passes: int,
        fewest: int,
        stopped: Callable[[], bool],
        info: Callable[[str], None],
    ) -> None:
        """
        Args:
            prompts: where they come from.
            low: the mean score of a prompt's responses is above this,
            high: and below this. Neither: the scores are not all the same, whatever they are.
            option: how the user calls the two.
            passes: how often the prompts are gone through.
            fewest: responses that can still be trained on.
            stopped: whether the run is to stop.
            info: shows a line to the user.
        """
        self._prompts, self._low, self._high, self._option = prompts, low, high, option
        self._passes, self._fewest, self._stopped, self._info = passes, fewest, stopped, info
        self.metrics: dict[str, float] = {}
        """Of the last step."""
        self.ended = False
        """Whether the last step took all that the data had left."""

    def fill(self, step: int, wanted: int, response: Callable[[int], Batch]) -> Batch | None:
        """Scored responses to `wanted` prompts that pass; fewer where the data end, and None where too few are left, or
        the run is to stop.

        Args:
            step: its number.
            wanted: prompts of a full step.
            response: makes and scores the responses to the next so many prompts.

        Raises:
            ValueError: the data end before there was anything to train on.
        """
        before = self._prompts.taken
        filled = fill_groups(
            response,
            wanted=wanted,
            available=self._prompts.left(self._passes),
            keep=self._keep,
            stopped=self._stopped,
            info=lambda progress: self._info(f"step {step}: {progress}"),
        )
        self.metrics = filled.metrics
        if filled.prompts_kept == wanted:
            return filled.batch
        if self._stopped():
            self._prompts.seek(before)  # the same responses are made again when the run continues
            return None
        self.ended = True
        enough = len(filled.batch or ()) >= self._fewest
        bounds = f"a mean score in {self._low} to {self._high}"
        wanted_scores = "scores that differ" if self._low is None else bounds
        passed = f"of the last {filled.prompts_seen} prompts, {filled.prompts_kept} have {wanted_scores}"
        if step == 1 and not enough:
            raise ValueError(f"{passed}: nothing to train on; set {self._option}, or other prompts")
        self._info(f"the data ends: {passed}" + ("" if enough else ", too few to train on"))
        return filled.batch if enough else None

    def _keep(self, samples: Batch) -> Tensor:
        from components.rl.advantages import group_std
        from components.rl.rewards import groups_within

        if self._low is None or self._high is None:
            return group_std(samples["score"], samples["prompt_id"]) > 0
        return groups_within(samples["score"], samples["prompt_id"], self._low, self._high)
