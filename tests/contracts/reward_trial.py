"""A reward function or scorer, run as training runs it: by `open_reward`, in a process of its own, with a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from components.rewards.base import FUNCTION_NAME, RewardOutput, RewardSettings, RewardSource, is_reward_file
from components.rewards.errors import RewardError
from components.rewards.functions import column_parameters
from components.rewards.opening import open_reward
from components.rewards.scorers import register_scorer, scorer_names
from components.rewards.workers import WorkerReward
from tests.contracts.samples import Sample
from tests.contracts.targets import Target


class RewardTrial:
    """Asks one target, fails the test that asked when no rewards come, and ends the processes at the end."""

    def __init__(self, target: Target, samples: list[Sample], deadline_s: float, folder: Path) -> None:
        """`folder` is for the reward file that is written when the target itself is none."""
        self.target = target
        self.samples = samples
        self._deadline_s = deadline_s
        self._folder = folder
        self._opened: dict[bool, RewardSource] = {}
        self._given_up = ""
        is_generated = target.kind == "reward" and not any(sample.columns for sample in samples)
        self._label_columns = column_parameters(target.value) if is_generated else []

    def ask(self, samples: Sequence[Sample], what: str, advice: str = "") -> RewardOutput:
        """Get the rewards of all samples in one call; whatever else comes fails the test.

        Args:
            what: what the samples are, for the message.
            advice: what to change in the target, where its own error may not say it.
        """
        if self._given_up:
            self.fail(f"not asked for {what}: {self._given_up}")
        return self._ask(samples, what, advice)

    def ask_first(self, advice: str) -> None:
        """Ask for one sample; a target that cannot reward it is asked for nothing more."""
        self._given_up = "it could not reward a batch of one"
        self._ask(self.samples[:1], "a batch of one", advice)
        self._given_up = ""

    def watch(self, samples: Sequence[Sample], what: str) -> list[str]:
        """Ask again with somebody watching; return what `Watched` saw and what failed, a line for each."""
        if self._given_up:
            self.fail(f"not asked for {what}: {self._given_up}")
        try:
            output, warnings = self._call(samples, watched=True)
        except RewardError as error:  # a wrong number of rewards, which has a contract of its own
            return [str(error)]
        # A chunk that fails is asked for again answer by answer, and may then do nothing wrong.
        return [*warnings, *output.failures.values()]

    def restart(self) -> None:
        """Have the next question answered by a new process."""
        if reward := self._opened.pop(False, None):
            reward.close()

    def fail(self, message: str) -> NoReturn:
        """Fail the test with a message about the target, and no stack of ours."""
        pytest.fail(f"{self.target.spec}, {message.rstrip()}", pytrace=False)

    def close(self) -> None:
        for reward in self._opened.values():
            reward.close()
        self._opened.clear()

    def _ask(self, samples: Sequence[Sample], what: str, advice: str) -> RewardOutput:
        began, problem, warnings = time.monotonic(), None, []
        try:
            output, warnings = self._call(samples, watched=False)
        except (RewardError, ValueError) as error:
            problem, output = error, None
        if output is not None and not warnings:
            return output
        # Training asks again for each answer alone where several fail: that is slow, and hides that they do.
        lines = [f"asked for {what}: {problem or warnings[0]}", advice, *getattr(problem, "__notes__", [])]
        if time.monotonic() - began >= self._deadline_s:
            self._given_up = f"it did not answer in time when asked for {what}"
            lines.insert(1, f"Answer within {self._deadline_s:g} s, or allow more with --deadline.")
        return self.fail("\n".join(filter(None, lines)))

    def _call(self, samples: Sequence[Sample], *, watched: bool) -> tuple[RewardOutput, list[str]]:
        """Return the rewards, and what the workers warned of."""
        with _Warnings() as warnings:
            output = self._open(watched)(
                [sample.query for sample in samples],
                [sample.prompt for sample in samples],
                [sample.label for sample in samples],
                responses=[sample.response for sample in samples],
                rows=[self._row(sample) for sample in samples],
            )
        return output, warnings

    def _row(self, sample: Sample) -> dict[str, Any]:
        """Give the columns of a sample. One that the function takes and that generated rows lack is the label's."""
        columns = dict.fromkeys(self._label_columns, sample.label) | dict(sample.columns)
        return {"columns": columns, "completion_ids": list(sample.response.encode())}

    def _open(self, watched: bool) -> RewardSource:
        if watched not in self._opened:
            # None may fail, but where somebody watches: then the reasons are what is asked for.
            settings = RewardSettings(timeout_s=self._deadline_s, max_failed_share=float(watched))
            self._opened[watched] = open_reward(self._spec(watched), settings)
        return self._opened[watched]

    def _spec(self, watched: bool) -> str:
        """Say what `open_reward` is to open: a file with reward_func, or the name of a scorer."""
        target = self.target
        source, _, name = target.address.rpartition(":")
        if target.kind == "scorer" and not watched:
            # Without the brackets it would be a file's reward function.
            name = f"{target.address}()" if is_reward_file(target.address) else target.address
            if name not in scorer_names():
                register_scorer(name, target.value)
            return name
        if source.endswith(".py") and name == FUNCTION_NAME and not watched:
            return source
        path = self._folder / ("watched.py" if watched else "opened.py")
        wrapper = {"reward": "Watched", "scorer": "watched_scorer"}[target.kind] if watched else ""
        path.write_text(
            "from tests.contracts.targets import load_value\n"
            "from tests.contracts.watched import Watched, watched_scorer\n"
            f"{FUNCTION_NAME} = {wrapper}(load_value({target.address!r}, {target.kind!r}))\n"
        )
        return str(path)


class _Warnings(logging.Handler):
    """Keeps what the reward's workers warn of while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self._logger = logging.getLogger(WorkerReward.__module__)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> list[str]:
        self._logger.addHandler(self)
        return self.messages

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
