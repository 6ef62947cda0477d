"""A reward function or scorer that is run as in training: by `open_reward`, in a separate process, with a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from components.rewards.base import RewardOutput, RewardSettings, RewardSource, is_reward_file
from components.rewards.errors import RewardError
from components.rewards.files import FUNCTION_NAME
from components.rewards.opening import open_reward
from components.rewards.scorers import register_scorer, scorer_names
from components.rewards.workers import WorkerReward
from plugins.reward_functions.functions import column_parameters
from tests.contracts.samples import Sample
from tests.contracts.targets import Target


class RewardTrial:
    """Requests rewards of one target, and fails the calling test if it returns none."""

    def __init__(self, target: Target, samples: list[Sample], deadline_s: float, folder: Path) -> None:
        """
        Args:
            target: the reward function or scorer.
            samples: rows to score.
            deadline_s: timeout of one call in seconds.
            folder: folder for a generated reward file, if the target is not a reward file itself.
        """
        self.target = target
        self.samples = samples
        self._deadline_s = deadline_s
        self._folder = folder
        self._opened: dict[bool, RewardSource] = {}
        self._given_up = ""
        is_generated = target.kind == "reward" and not any(sample.columns for sample in samples)
        self._label_columns = column_parameters(target.value) if is_generated else []

    def ask(self, samples: Sequence[Sample], description: str, advice: str = "") -> RewardOutput:
        """Request the rewards of all samples in one call. Fails the test on an error or a warning.

        Args:
            samples: rows to score.
            description: description of the samples, for the message.
            advice: advice for the message, if the error of the target may not say what to change.
        """
        if self._given_up:
            self.fail(f"not asked for {description}: {self._given_up}")
        return self._request(samples, description, advice)

    def ask_first(self, advice: str) -> None:
        """Request the reward of one sample. After a failure all further requests fail immediately."""
        self._given_up = "it could not reward a batch of one"
        self._request(self.samples[:1], "a batch of one", advice)
        self._given_up = ""

    def watch(self, samples: Sequence[Sample], description: str) -> list[str]:
        """Request rewards through `Watched`, and return its findings and all failures."""
        if self._given_up:
            self.fail(f"not asked for {description}: {self._given_up}")
        try:
            output, warnings = self._call(samples, watched=True)
        except RewardError as error:  # a wrong number of rewards, which has its own contract
            return [str(error)]
        # Warnings count too: a chunk that fails is repeated response by response, and may then succeed.
        return [*warnings, *output.failures.values()]

    def restart(self) -> None:
        """Let a new process serve the next request."""
        if reward := self._opened.pop(False, None):
            reward.close()

    def fail(self, message: str) -> NoReturn:
        """Fail the test with a message about the target, without the stack of the contracts."""
        pytest.fail(f"{self.target.spec}, {message.rstrip()}", pytrace=False)

    def close(self) -> None:
        for reward in self._opened.values():
            reward.close()
        self._opened.clear()

    def _request(self, samples: Sequence[Sample], description: str, advice: str) -> RewardOutput:
        began = time.monotonic()
        problem: Exception | None = None
        warnings: list[str] = []
        output: RewardOutput | None = None
        try:
            output, warnings = self._call(samples, watched=False)
        except (RewardError, ValueError) as error:
            problem = error
        if output is not None and not warnings:
            return output
        # A warning fails the test too: if several responses fail, training repeats each of them, which is slow.
        parts = [f"asked for {description}: {problem or warnings[0]}", advice, *getattr(problem, "__notes__", [])]
        if time.monotonic() - began >= self._deadline_s:
            self._given_up = f"it did not return in time when asked for {description}"
            parts.insert(1, f"Return within {self._deadline_s:g} s, or allow more with --deadline.")
        return self.fail("\n".join(filter(None, parts)))

    def _call(self, samples: Sequence[Sample], *, watched: bool) -> tuple[RewardOutput, list[str]]:
        """Return the rewards and the warnings of the workers."""
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
        """Return the columns of a sample. A column that the function takes and a generated row lacks has the label."""
        columns = dict.fromkeys(self._label_columns, sample.label) | dict(sample.columns)
        return {"columns": columns, "completion_ids": list(sample.response.encode())}

    def _open(self, watched: bool) -> RewardSource:
        if watched not in self._opened:
            # With `watched` all responses may fail, because the failures are the result.
            settings = RewardSettings(timeout_s=self._deadline_s, max_failed_share=float(watched))
            self._opened[watched] = open_reward(self._spec(watched), settings)
        return self._opened[watched]

    def _spec(self, watched: bool) -> str:
        """Return the argument of `open_reward`: a file with reward_func, or the name of a scorer."""
        target = self.target
        source, _, name = target.address.rpartition(":")
        if target.kind == "scorer" and not watched:
            name = target.address
            if is_reward_file(name):
                name += "()"  # without brackets it would name a reward function of the file
            if name not in scorer_names():
                register_scorer(name, target.value)
            return name
        if source.endswith(".py") and name == FUNCTION_NAME and not watched:
            return source
        path = self._folder / "opened.py"
        wrapper = ""
        if watched:
            path = self._folder / "watched.py"
            wrapper = {"reward": "Watched", "scorer": "watched_scorer"}[target.kind]
        path.write_text(
            "from tests.contracts.targets import load_value\n"
            "from tests.contracts.watched import Watched, watched_scorer\n"
            f"{FUNCTION_NAME} = {wrapper}(load_value({target.address!r}, {target.kind!r}))\n"
        )
        return str(path)


class _Warnings(logging.Handler):
    """Collects the warnings of the reward's workers inside the block."""

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
