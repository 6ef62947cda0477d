"""Episodes as a Batch. B sequences, N all their tokens end to end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from agents.episode import Episode
from components.batch import Batch
from components.rewards.names import metric_names


def as_batch(prompts: Batch, episodes: Sequence[Sequence[Episode]], version: int) -> Batch:
    """Put episodes together with the prompts that they started from.

    Args:
        prompts: their per-sequence and object columns are carried through.
        episodes: of each prompt the sequences of its episode, the main one first.
        version: of the weights, for sequences in which the policy wrote nothing.

    Returns:
        Batch of B sequences in the order of `episodes`. Per token: `tokens`, `action_mask` (True on what the policy
        wrote), `rollout_logprob` (float32; 0 elsewhere), `turn` (int64, counted from 0; -1 elsewhere), `turn_reward`
        (float32; on the last token of each turn, 0 elsewhere), `token_version` (int64, of the weights that drew it; -1
        elsewhere). Per sequence: `prompt_length` (tokens before the first turn), `truncated`, `weight_version` (the
        oldest of its tokens'), `num_turns`, `branch`; where episodes are rewarded `reward`, `score`, `reward_failed`
        (1 for those that ended as errors or were aborted). `log_<name>` (see `metric_names`; NaN where an episode does
        not have it).
        Objects: `status`, `error`.
    """
    rows = [row for sequences in episodes for row in sequences]
    index = [i for i, sequences in enumerate(episodes) for _ in sequences]
    turn_N = _column((_turn_numbers(row) for row in rows), np.int64)
    per_token = {
        "tokens": _column((row.tokens for row in rows), np.int64),
        "action_mask": turn_N >= 0,
        "rollout_logprob": _column((row.logprobs for row in rows), np.float32),
        "turn": turn_N,
        "turn_reward": _column((_turn_rewards(row) for row in rows), np.float32),
        "token_version": _column((row.versions for row in rows), np.int64),
    }
    numbers = {
        "prompt_length": [row.prompt_length for row in rows],
        "weight_version": [min((v for v in row.versions if v >= 0), default=version) for row in rows],
        "num_turns": [len(row.turns) for row in rows],
        "branch": [row.branch for row in rows],
    }
    per_sequence = {name: torch.tensor(column, dtype=torch.int64) for name, column in numbers.items()}
    per_sequence["truncated"] = torch.tensor([row.status == "truncated" for row in rows], dtype=torch.bool)
    if any(row.is_rewarded for row in rows):
        per_sequence |= _rewards(rows)
    per_sequence |= _logs(rows)
    given = prompts.only(*prompts.per_sequence, *prompts.objects).select(index)
    objects = {"status": [row.status for row in rows], "error": [row.error for row in rows]}
    lengths = [len(row.tokens) for row in rows]
    return Batch(lengths, per_token, {**given.per_sequence, **per_sequence}, {**given.objects, **objects})


def _rewards(rows: Sequence[Episode]) -> dict[str, Tensor]:
    columns = {
        "reward": [row.reward for row in rows],
        "score": [row.score for row in rows],
        "reward_failed": [float(row.status in ("error", "aborted")) for row in rows],
    }
    return {name: torch.tensor(column, dtype=torch.float32) for name, column in columns.items()}


def _logs(rows: Sequence[Episode]) -> dict[str, Tensor]:
    columns = dict[str, list[float]]()
    for name, metric in metric_names(sorted({name for row in rows for name in row.logs})).items():
        columns[f"log_{metric}"] = [row.logs.get(name, math.nan) for row in rows]
    return {name: torch.tensor(column, dtype=torch.float32) for name, column in columns.items()}


def _turn_numbers(episode: Episode) -> list[int]:
    numbers = [-1] * len(episode.tokens)
    for number, turn in enumerate(episode.turns):
        numbers[turn.start : turn.end] = [number] * (turn.end - turn.start)
    return numbers


def _turn_rewards(episode: Episode) -> list[float]:
    """What an episode earned besides its turns is on the last token of the last one."""
    rewards = [0.0] * len(episode.tokens)
    left, last = episode.reward, None
    for turn in episode.turns:
        if turn.end > turn.start:
            rewards[turn.end - 1] = turn.reward
            left, last = left - turn.reward, turn
    if last is not None and not math.isclose(left, 0.0, abs_tol=1e-9 * max(1.0, abs(episode.reward))):
        rewards[last.end - 1] += left
    return rewards


def _column(rows: Iterable[Sequence[float]], dtype: type[np.generic]) -> Tensor:
    # Three times as fast as a tensor of a list.
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype))
