"""A weighted sum of rewards, each of a kind of its own. B sequences, P parts of the sum."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from components.data.reward_workers import allowed_failures
from components.data.rewards import RewardError, RewardOutput, RewardSettings, RewardSource

if TYPE_CHECKING:
    from torch import Tensor


class RewardSum:
    """Rewards every sequence by each part, at the same time, and adds up.

    A response that failed in one part has failed. Logs: `<part>_reward` and `<part>_score` of each, and what it logs
    itself as `<part>_log_<name>`; a part is called by its scorer, its file or its server.
    """

    def __init__(
        self,
        parts: Sequence[tuple[float, str]],
        sources: Sequence[RewardSource],
        settings: RewardSettings,
        close: Callable[[], None],
    ) -> None:
        """
        Args:
            parts: weight and specification of each, as `reward_parts` gives them.
            sources: the parts, opened.
            settings: of all.
            close: ends what the parts have started.
        """
        self._settings = settings
        self._weights = [weight for weight, _ in parts]
        self._names = _names([spec for _, spec in parts])
        self._sources = sources
        self.close = close

    def __call__(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        *,
        responses: Sequence[str] | None = None,
    ) -> RewardOutput:
        """Reward B sequences: the weighted sum of the rewards, and the weighted mean of the scores.

        What a part raises is raised; RewardError when more responses fail, in any part, than `max_failed_share` allows.
        """
        found: SimpleQueue[tuple[int, RewardOutput | Exception]] = SimpleQueue()

        def ask(index: int) -> None:
            try:
                found.put((index, self._sources[index](queries, prompts, labels, responses=responses)))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where the caller waits
                found.put((index, error))

        for index in range(len(self._sources)):
            threading.Thread(target=ask, args=(index,), daemon=True).start()
        outputs: dict[int, RewardOutput] = {}
        while len(outputs) < len(self._sources):
            index, output = found.get()
            if isinstance(output, Exception):
                output.add_note(f"in the part {self._names[index]!r} of a sum of rewards")
                raise output
            outputs[index] = output
        return self._added([outputs[index] for index in range(len(outputs))])

    def __enter__(self) -> RewardSum:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _added(self, outputs: list[RewardOutput]) -> RewardOutput:
        import torch

        failures = {
            place: f"{name}: {reason}"
            for name, output in zip(self._names, outputs)
            for place, reason in output.failures.items()
        }
        count = len(outputs[0].reward_B)
        if len(failures) > allowed_failures(count, self._settings.max_failed_share):
            first = failures[min(failures)]
            raise RewardError(
                f"{len(failures)} of {count} responses failed in a part of the sum of rewards, more than the allowed "
                f"share of {self._settings.max_failed_share:g}; the first: {first}"
            )
        logs: dict[str, Tensor] = {}
        for name, output in zip(self._names, outputs):
            own = {f"log_{log}": value_B for log, value_B in output.logs.items()}
            own |= {"reward": output.reward_B, "score": output.score_B}
            logs |= {f"{name}_{log}": value_B for log, value_B in own.items()}
        # In double precision, so that all parts right is a score of 1 and not a little beside it.
        weight_P = torch.tensor(self._weights, dtype=torch.float64)
        reward_B = weight_P @ torch.stack([output.reward_B.double() for output in outputs])
        score_B = weight_P @ torch.stack([output.score_B.double() for output in outputs]) / weight_P.sum()
        reward_B, score_B = reward_B.float(), score_B.float()
        for column_B in (reward_B, score_B, *logs.values()):
            column_B[list(failures)] = 0.0
        return RewardOutput(reward_B, score_B, logs, dict(sorted(failures.items())))


def _names(specs: Sequence[str]) -> list[str]:
    """What the parts are called in logs, each otherwise."""
    names: list[str] = []
    for spec in specs:
        url = urlsplit(spec.partition(",")[0])
        name = f"{url.hostname}{url.path}" if "://" in spec else Path(spec).stem
        name = re.sub(r"\W+", "_", name).strip("_")
        count = sum(other == name or re.fullmatch(rf"{name}_\d+", other) is not None for other in names)
        names.append(f"{name}_{count + 1}" if count else name)
    return names
