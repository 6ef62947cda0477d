"""Scoring of responses in a thread, from their completion in the engine to the columns of the batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from components.batch import Batch
from components.data.samples import ask_for_rewards, with_rewards
from components.generate.config import EVALUATION_STEP, SamplingConfig
from components.rewards.base import RewardOutput, RewardSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


class StreamedRewards:
    """Generates with an engine, and scores each response when it is complete."""

    def __init__(self, engine: Any, source: RewardSource, tokenizer: PreTrainedTokenizerBase) -> None:
        """
        Args:
            engine: engine with an attribute `on_finished`, which it calls with the index and the tokens of each
                complete response.
            source: reward of which each response is independent of the others.
            tokenizer: tokenizer of the policy.
        """
        self._engine = engine
        self._source = source
        self._tokenizer = tokenizer

    def generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """Generate as `RolloutEngine.generate` does.

        Args:
            prompts: see `RolloutEngine.generate`, with the columns that rewards read.
            sampling: sampling parameters. Evaluations are scored afterwards, as their reward may be another one.

        Returns:
            The responses, with the columns of `with_rewards` unless one of them failed.
        """
        if sampling.step == EVALUATION_STEP or not len(prompts):
            return self._engine.generate(prompts, sampling)
        # As in the trainer, where the step begins once its rollouts are complete.
        scoring = _Scoring(self._source, self._tokenizer, prompts, sampling.step - 1)
        self._engine.on_finished = scoring.add
        try:
            rollouts: Batch = self._engine.generate(prompts, sampling)
        finally:
            self._engine.on_finished = None
            scoring.end()
        output = scoring.output()
        return rollouts if output is None else with_rewards(rollouts, output, _log.info)

    def close(self) -> None:
        """End the reward workers."""
        self._source.close()


@dataclass(frozen=True)
class _Scored:
    """Rewards of some responses of a batch."""

    indices: list[int]
    """Indices in the batch."""
    output: RewardOutput


class _Scoring:
    """Scores the responses of one batch in a thread."""

    def __init__(self, source: RewardSource, tokenizer: PreTrainedTokenizerBase, prompts: Batch, step: int) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._tokens = prompts.lists("tokens")
        self._step = step
        self._finished = SimpleQueue[tuple[int, Sequence[int]] | None]()
        self._scored: list[_Scored] = []
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="streamed rewards", daemon=True)
        self._thread.start()

    def add(self, index: int, tokens: Sequence[int]) -> None:
        """Queue the complete response to a prompt. Called in the loop of the engine, so it returns at once."""
        self._finished.put((index, tokens))

    def end(self) -> None:
        """Wait until all queued responses are scored."""
        self._finished.put(None)
        self._thread.join()

    def output(self) -> RewardOutput | None:
        """Return the rewards of the batch, or None if a response has none."""
        count = len(self._prompts)
        if self._has_failed or sum(len(part.indices) for part in self._scored) != count:
            return None
        # In the order of the columns of a whole batch: a part may lack some of the numbers.
        most_first = sorted(self._scored, key=lambda part: -len(part.output.logs))
        names = dict.fromkeys(name for part in most_first for name in part.output.logs)
        # NaN where a response has no number, as in `join_columns`.
        logs = {name: torch.full((count,), torch.nan) for name in names}
        reward_B = torch.zeros(count)
        score_B = torch.zeros(count)
        for part in self._scored:
            reward_B[part.indices] = part.output.reward_B
            score_B[part.indices] = part.output.score_B
            for name, value_B in part.output.logs.items():
                logs[name][part.indices] = value_B
        return RewardOutput(reward_B, score_B, logs)

    def _run(self) -> None:
        while responses := self._next():
            if not self._has_failed:
                self._score(responses)

    def _next(self) -> list[tuple[int, Sequence[int]]]:
        """Return all queued responses, of which there is at least one, or none after the last one."""
        responses: list[tuple[int, Sequence[int]]] = []
        item = self._finished.get()
        while item is not None:
            responses.append(item)
            try:
                item = self._finished.get_nowait()
            except Empty:
                return responses
        # The end is queued again behind the last responses.
        if responses:
            self._finished.put(None)
        return responses

    def _score(self, responses: Sequence[tuple[int, Sequence[int]]]) -> None:
        indices = [index for index, _ in responses]
        chosen = self._prompts.select(torch.tensor(indices))
        rows = [self._tokens[index] + list(tokens) for index, tokens in responses]
        samples = Batch.from_rows({"tokens": rows}, {"prompt_length": chosen.lengths.tolist()}, chosen.objects)
        try:
            output = ask_for_rewards(samples, self._source, self._tokenizer, self._step)
        except Exception as error:  # noqa: BLE001 - scored again after the generation, which raises it where it counts
            _log.warning("responses are scored after the generation, since one has no reward yet: %r", error)
            self._has_failed = True
            return
        # Failures count for the whole batch, and are reported by its indices.
        self._has_failed = bool(output.failures)
        self._scored.append(_Scored(indices, output))
