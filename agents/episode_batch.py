"""Conversion of episodes to a Batch. B: number of sequences. N: total number of tokens of all sequences."""

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
    """Build a batch from episodes and their prompts.

    Args:
        prompts: prompts, whose per-sequence and object columns are copied.
        episodes: sequences of the episode of each prompt, with the main one first.
        version: weight version of sequences without tokens of the policy.

    Returns:
        Batch of B sequences in the order of `episodes`.

        Per token [N]: `tokens`, `action_mask` (True for tokens of the policy), `rollout_logprob` (float32, 0 for other
        tokens), `turn` (int64 from 0, -1 for other tokens), `turn_reward` (float32, on the last token of each turn, 0
        elsewhere), `token_version` (int64 weight version that generated the token, -1 for other tokens).

        Per sequence [B]: `prompt_length` (number of tokens before the first turn), `truncated`, `weight_version` (the
        oldest version of its tokens), `num_turns`, `branch`. If the episodes are rewarded: `reward`, `score` and
        `reward_failed` (1 for the status "error" or "aborted"). `log_<name>` (see `metric_names`; NaN if an episode
        lacks the metric).

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
        # A sequence without a token of the policy gets the version in use.
        "weight_version": [min((v for v in row.versions if v >= 0), default=version) for row in rows],
        "num_turns": [len(row.turns) for row in rows],
        "branch": [row.branch for row in rows],
    }
    per_sequence = {name: torch.tensor(column, dtype=torch.int64) for name, column in numbers.items()}
    per_sequence["truncated"] = torch.tensor([row.status == "truncated" for row in rows], dtype=torch.bool)
    if any(row.is_rewarded for row in rows):
        per_sequence |= _rewards(rows)
    per_sequence |= _logs(rows)
    kept = prompts.only(*prompts.per_sequence, *prompts.objects).select(index)
    objects = {"status": [row.status for row in rows], "error": [row.error for row in rows]}
    lengths = [len(row.tokens) for row in rows]
    return Batch(lengths, per_token, {**kept.per_sequence, **per_sequence}, {**kept.objects, **objects})


def _rewards(rows: Sequence[Episode]) -> dict[str, Tensor]:
    columns = {
        "reward": [row.reward for row in rows],
        "score": [row.score for row in rows],
        # An aborted episode has no reward, and a reward of 0 would count as a bad response.
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
    """Return the reward of each token. A reward besides those of the turns is on the last token of the last turn."""
    rewards = [0.0] * len(episode.tokens)
    left = episode.reward
    last = None
    for turn in episode.turns:
        if turn.end > turn.start:
            rewards[turn.end - 1] = turn.reward
            left -= turn.reward
            last = turn
    # A difference as small as the rounding of the sum is not a further reward.
    if last is not None and not math.isclose(left, 0.0, abs_tol=1e-9 * max(1.0, abs(episode.reward))):
        rewards[last.end - 1] += left
    return rewards


def _column(rows: Iterable[Sequence[float]], dtype: type[np.generic]) -> Tensor:
    # Three times as fast as torch.tensor of a list.
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype))
