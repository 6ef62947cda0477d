"""Weighted sum of rewards.

Shape suffixes: B sequences; P parts of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from components.rewards.base import Responses, RewardOutput, RewardSettings, RewardSource
from components.rewards.errors import RewardError
from components.rewards.names import metric_names
from components.rewards.opening import open_part
from components.rewards.part_names import part_names
from components.rewards.threads import in_threads
from components.rewards.workers import allowed_failures

if TYPE_CHECKING:
    from torch import Tensor


class RewardSum(RewardSource):
    """Weighted sum of rewards. All parts are computed in parallel.

    A response that fails in one part has failed. If a part returns None for a response, the other parts reward it
    alone; if all parts return None, it has failed. Logs: `<part>` (the reward of a part), `<part>/score`, and
    `<part>/<name>` for the numbers that a part logs. They are NaN where a part has no reward. See `part_names`.
    """

    def __init__(self, parts: Sequence[tuple[float, str]], settings: RewardSettings) -> None:
        """Open the parts.

        Args:
            parts: weight and specification of each part, as in the result of `reward_parts`.
            settings: settings of processes and requests.
        """
        self._settings = settings
        self._weights = [weight for weight, _ in parts]
        self._names = part_names([spec for _, spec in parts])
        self.source = f"the sum of {', '.join(self._names)}"
        # If one part cannot be opened, the stack closes those that were opened before it.
        with ExitStack() as opened:
            self._sources = [opened.enter_context(open_part(spec, settings, in_sum=True)) for _, spec in parts]
            self._opened = opened.pop_all()
        self.reads_queries = any(source.reads_queries for source in self._sources)

    def reward(self, samples: Responses) -> RewardOutput:
        """Return the weighted sum of the parts' rewards, and the weighted mean of their scores.

        A response with a score of 1 in every part thus has a score of 1, whatever the weights are.

        Raises:
            RewardError: the share of responses that failed in any part is above `max_failed_share`.
            Exception: any error of a part, with a note that names the part.
        """

        def reward_part(index: int) -> tuple[int, RewardOutput]:
            try:
                return index, self._sources[index].reward(samples)
            except Exception as error:
                error.add_note(f"in the part {self._names[index]!r} of a sum of rewards")
                raise

        # In parallel: parts wait for processes and servers, not for this process.
        outputs = dict(in_threads([partial(reward_part, index) for index in range(len(self._sources))]))
        return self._added([output for _, output in sorted(outputs.items())])

    def close(self) -> None:
        """Close all parts."""
        self._opened.close()

    def _added(self, outputs: list[RewardOutput]) -> RewardOutput:
        import torch

        failures: dict[int, str] = {}
        for name, output in zip(self._names, outputs):
            for index, reason in output.failures.items():
                failures[index] = f"{name}: {reason}"
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
        # In float64, so that the score of a response with a score of 1 in all parts is exactly 1.
        weight_P = torch.tensor(self._weights, dtype=torch.float64)
        reward_B = weight_P @ torch.stack([output.reward_B.double() for output in outputs])
        counts_PB = torch.ones(len(outputs), count, dtype=torch.float64)
        for part, indices in enumerate(absent):
            counts_PB[part, list(indices)] = 0.0
        # The lower bound only prevents a division by 0 where no part has a reward. These responses have failed.
        weight_B = (weight_P @ counts_PB).clamp(min=weight_P.min())
        score_B = weight_P @ torch.stack([output.score_B.double() for output in outputs]) / weight_B
        output = RewardOutput(reward_B.float(), score_B.float(), logs, dict(sorted(failures.items())))
        failed = list(failures)
        output.reward_B[failed] = 0.0
        output.score_B[failed] = 0.0
        for log_B in logs.values():
            log_B[failed] = math.nan
        return output
