"""Opens a reward by what it is called: a scorer, a Python file, reward servers, or a weighted sum of these.

B sequences, P parts of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from components.rewards.base import (
    Responses,
    RewardOutput,
    RewardSettings,
    RewardSource,
    check_reward,
    in_threads,
    reward_parts,
)
from components.rewards.errors import RewardError
from components.rewards.names import metric_names, part_names
from components.rewards.servers import client_of, is_server, reward_urls
from components.rewards.workers import WorkerReward, allowed_failures

if TYPE_CHECKING:
    from torch import Tensor


def open_reward(spec: str, settings: RewardSettings | None = None) -> RewardSource:
    """Open a reward: the name of a scorer, a function of a .py file (`FILE.py` or `FILE.py:NAME`), or
    URLs with commas between them.

    Or a weighted sum of such, each with its weight: `0.7*gsm8k + 0.3*style.py + 1*http://a:5000/score`.
    """
    check_reward(spec)
    settings = settings or RewardSettings()
    parts = reward_parts(spec)
    return _open_one(spec, settings) if parts == [(1.0, spec)] else RewardSum(parts, settings)


def _open_one(spec: str, settings: RewardSettings, *, in_sum: bool = False) -> RewardSource:
    if is_server(spec):
        urls = reward_urls(spec)
        return client_of(urls)(urls, settings)
    return WorkerReward(spec, settings, in_sum=in_sum)


class RewardSum(RewardSource):
    """Rewards every sequence by each part, at the same time, and adds up.

    A response that failed in one part has failed. One for which a part has no reward, None, is rewarded by the others
    alone; where no part has one, it has failed. Logs: `<part>`, the reward of each, `<part>/score`, and what it logs
    itself as `<part>/<name>`, with NaN where a part has no reward; see `part_names`.
    """

    def __init__(self, parts: Sequence[tuple[float, str]], settings: RewardSettings) -> None:
        """Open the parts: weight and specification of each, as `reward_parts` gives them."""
        self._settings = settings
        self._weights = [weight for weight, _ in parts]
        self._names = part_names([spec for _, spec in parts])
        self.source = f"the sum of {', '.join(self._names)}"
        with ExitStack() as opened:
            self._sources = [opened.enter_context(_open_one(spec, settings, in_sum=True)) for _, spec in parts]
            self._opened = opened.pop_all()

    def reward(self, given: Responses) -> RewardOutput:
        """Reward B sequences: the reward is the weighted sum of the parts' rewards, and the score the weighted mean of
        their scores, so that a response which is right in every part has a score of 1 whatever the weights are.

        What a part raises is raised; RewardError when more responses fail, in any part, than `max_failed_share` allows.
        """

        def ask(index: int) -> tuple[int, RewardOutput]:
            try:
                return index, self._sources[index].reward(given)
            except Exception as error:
                error.add_note(f"in the part {self._names[index]!r} of a sum of rewards")
                raise

        outputs = dict(in_threads([partial(ask, index) for index in range(len(self._sources))]))
        return self._added([output for _, output in sorted(outputs.items())])

    def close(self) -> None:
        """End what the parts have started."""
        self._opened.close()

    def _added(self, outputs: list[RewardOutput]) -> RewardOutput:
        import torch

        failures = {
            place: f"{name}: {reason}"
            for name, output in zip(self._names, outputs)
            for place, reason in output.failures.items()
        }
        count = len(outputs[0].reward_B)
        absent = [set(output.absent) for output in outputs]
        failures |= dict.fromkeys(set.intersection(*absent), "every part of the sum of rewards returned None")
        if len(failures) > allowed_failures(count, self._settings.max_failed_share):
            first = failures[min(failures)]
            raise RewardError(
                f"{len(failures)} of {count} responses failed in a part of the sum of rewards, more than the allowed "
                f"share of {self._settings.max_failed_share:g}; the first: {first}"
            )
        logs: dict[str, Tensor] = {}
        for name, output in zip(self._names, outputs):
            metric_of = metric_names(output.logs)
            columns = {f"{name}/{metric_of[log]}": value_B for log, value_B in output.logs.items()}
            logs |= {name: output.reward_B.clone(), f"{name}/score": output.score_B.clone()} | columns
            for column in (name, f"{name}/score"):
                logs[column][output.absent] = math.nan
        # In double precision, so that all parts right is a score of 1 and not a little beside it.
        weight_P = torch.tensor(self._weights, dtype=torch.float64)
        reward_B = weight_P @ torch.stack([output.reward_B.double() for output in outputs])
        counts_PB = torch.ones(len(outputs), count, dtype=torch.float64)
        for part, places in enumerate(absent):
            counts_PB[part, list(places)] = 0.0
        weight_B = (weight_P @ counts_PB).clamp(min=weight_P.min())
        score_B = weight_P @ torch.stack([output.score_B.double() for output in outputs]) / weight_B
        reward_B, score_B = reward_B.float(), score_B.float()
        for column_B, nothing in ((reward_B, 0.0), (score_B, 0.0), *((log_B, math.nan) for log_B in logs.values())):
            column_B[list(failures)] = nothing
        return RewardOutput(reward_B, score_B, logs, dict(sorted(failures.items())))
