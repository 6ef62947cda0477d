"""A reward function or scorer, run as training runs it: by `open_reward`, in a process of its own, with a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from components.data.remote_reward import RemoteReward
from components.data.reward_workers import WorkerReward
from components.data.rewards import FUNCTION_NAME, RewardError, RewardOutput, RewardSettings, open_reward
from components.data.scorers import register_scorer, scorer_names
from tests.contracts.samples import Sample
from tests.contracts.targets import Target
from tests.contracts.watched import Watch, Watched


class RewardTrial:
    """Asks one target, fails the test that asked when no rewards come, and ends the processes at the end."""

    def __init__(self, target: Target, samples: list[Sample], deadline_s: float, folder: Path) -> None:
        """`folder` is for the reward file that is written when the target itself is none."""
        self.target = target
        self.samples = samples
        self._deadline_s = deadline_s
        self._folder = folder
        self._opened: dict[Watch | None, WorkerReward | RemoteReward] = {}
        self._given_up = ""

    def ask(
        self, samples: Sequence[Sample], what: str, advice: str = "", *, watch: Watch | None = None
    ) -> RewardOutput:
        """Get the rewards of all samples in one call; whatever else comes fails the test.

        Args:
            what: what the samples are, for the message.
            advice: what to change in the target, where its own error may not say it.
            watch: what to look at in the process that runs it.
        """
        if self._given_up:
            self.fail(f"not asked for {what}: {self._given_up}")
        return self._ask(samples, what, advice, watch)

    def ask_first(self, advice: str) -> RewardOutput:
        """Ask for one sample; a target that cannot reward it is asked for nothing more."""
        self._given_up = "it could not reward a batch of one"
        output = self._ask(self.samples[:1], "a batch of one", advice, None)
        self._given_up = ""
        return output

    def _ask(self, samples: Sequence[Sample], what: str, advice: str, watch: Watch | None) -> RewardOutput:
        warnings = _Warnings()
        began = time.monotonic()
        try:
            with warnings:
                output = self._open(watch)(
                    [sample.query for sample in samples],
                    [sample.prompt for sample in samples],
                    [sample.label for sample in samples],
                    responses=[sample.response for sample in samples],
                )
        except (RewardError, ValueError) as error:
            if time.monotonic() - began >= self._deadline_s:
                self._given_up = f"it did not answer in time when asked for {what}"
                advice = f"Answer within {self._deadline_s:g} s, or allow more with --deadline. {advice}"
            self.fail("\n".join([f"asked for {what}: {error}", advice, *getattr(error, "__notes__", [])]))
        if warnings.messages:
            # Training asks again for each answer alone, which is slow, and hides that only that works.
            self.fail(f"asked for {what}: {warnings.messages[0]}\n{advice}")
        return output

    def refusal(self, sample: Sample, what: str) -> str:
        """Ask for one sample; "" when a reward came or ValueError said why not, else what came instead."""
        if self._given_up:
            self.fail(f"not asked for {what}: {self._given_up}")
        try:
            self._open("refusals")([sample.query], [sample.prompt], [sample.label], responses=[sample.response])
        except RewardError as error:
            reason = str(error).partition("the first: ")[2]
            return "" if reason.startswith("Refused: ") else reason
        return ""

    def restart(self) -> None:
        """Have the next question answered by a new process."""
        self.close()

    def fail(self, message: str) -> NoReturn:
        """Fail the test with a message about the target, and no stack of ours."""
        pytest.fail(f"{self.target.spec}, {message.rstrip()}", pytrace=False)

    def close(self) -> None:
        for reward in self._opened.values():
            reward.close()
        self._opened.clear()

    def _open(self, watch: Watch | None) -> WorkerReward | RemoteReward:
        if watch not in self._opened:
            settings = RewardSettings(timeout_s=self._deadline_s, max_failed_share=0.0)
            try:
                self._opened[watch] = open_reward(self._spec(watch), settings)
            except ValueError:
                self._given_up = "it cannot be loaded in a process of its own"
                raise
        return self._opened[watch]

    def _spec(self, watch: Watch | None) -> str:
        """Say what `open_reward` is to open: a file with reward_func, or the name of a scorer."""
        target = self.target
        source, _, name = target.address.rpartition(":")
        if target.kind == "scorer":
            if target.address in scorer_names() and watch is None:
                return target.address
            scorer = target.address if watch is None else f"{target.address} ({watch} watched)"
            if scorer not in scorer_names():
                register_scorer(scorer, target.value if watch is None else Watched(target.value, watch))
            return scorer
        if source.endswith(".py") and name == FUNCTION_NAME and watch is None:
            return source
        loaded = f"load_value({target.address!r}, {target.kind!r})"
        lines = [
            "from tests.contracts.targets import load_value",
            "from tests.contracts.watched import Watched",
            f"{FUNCTION_NAME} = {loaded if watch is None else f'Watched({loaded}, {watch!r})'}",
        ]
        path = self._folder / f"reward_{watch}.py"
        path.write_text("\n".join(lines) + "\n")
        return str(path)


class _Warnings(logging.Handler):
    """Keeps what the reward's workers warn of while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self._logger = logging.getLogger(WorkerReward.__module__)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> None:
        self._logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
