"""Episodes as a Batch. B sequences, N all their tokens end to end."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agents.episode import Episode
from components.batch import Batch


def as_batch(prompts: Batch, played: Sequence[Sequence[Episode]], version: int) -> Batch:
    """Put episodes together with the prompts that they started from.

    Args:
        prompts: their per-sequence and object columns are carried through.
        run: the sequences of each prompt's episode, the main one first.
        version: of the weights, for sequences in which the policy wrote nothing.

    Returns:
        Batch of B sequences in the order of `run`. Per token: `tokens`, `action_mask` (True on what the policy
        wrote), `rollout_logprob` (float32; 0 elsewhere), `turn` (int64, counted from 0; -1 elsewhere), `turn_reward`
        (float32; on the last token of each turn, 0 elsewhere), `token_version` (int64, of the weights that drew it; -1
        elsewhere). Per sequence: `prompt_length` (tokens before the first turn), `truncated`, `weight_version` (the
        oldest of its tokens'), `num_turns`, `branch`; where episodes are rewarded `reward`, `score`, `reward_failed`
        (1 for those that ended as errors or were aborted) and `log_<name>` (NaN where an episode does not have it).
        Objects: `status`, `error`.
    """
    rows = [episode for episodes in played for episode in episodes]
    index = [i for i, episodes in enumerate(played) for _ in episodes]
    columns = [row.columns for row in rows]
    turn_N = _column("q", [own.turns for own in columns])
    per_token = {
        "tokens": _column("q", [own.tokens for own in columns]),
        "action_mask": turn_N >= 0,
        "rollout_logprob": _column("f", [own.logprobs for own in columns]),
        "turn": turn_N,
        "turn_reward": _column("f", [own.rewards for own in columns]),
        "token_version": _column("q", [own.versions for own in columns]),
    }
    per_sequence = {
        "prompt_length": [row.prompt_length for row in rows],
        "weight_version": [version if own.oldest is None else own.oldest for own in columns],
        "num_turns": [len(row.turns) for row in rows],
        "branch": [row.branch for row in rows],
    }
    own = {name: torch.tensor(column, dtype=torch.int64) for name, column in per_sequence.items()}
    own["truncated"] = torch.tensor([row.status == "truncated" for row in rows], dtype=torch.bool)
    if any(row.is_rewarded for row in rows):
        own |= _rewards(rows)
    given = prompts.only(*prompts.per_sequence, *prompts.objects).select(index)
    objects = {"status": [row.status for row in rows], "error": [row.error for row in rows]}
    lengths = [len(row.tokens) for row in rows]
    return Batch(lengths, per_token, {**given.per_sequence, **own}, {**given.objects, **objects})


def _rewards(rows: Sequence[Episode]) -> dict[str, Tensor]:
    columns = {
        "reward": [row.reward for row in rows],
        "score": [row.score for row in rows],
        "reward_failed": [float(row.status in ("error", "aborted")) for row in rows],
    }
    for name in sorted({name for row in rows for name in row.logs}):
        columns[f"log_{name}"] = [row.logs.get(name, math.nan) for row in rows]
    return {name: torch.tensor(column, dtype=torch.float32) for name, column in columns.items()}


def _column(code: str, rows: Sequence[array[Any]]) -> Tensor:
    column: array[Any] = array(code)
    for row in rows:
        column.extend(row)
    return torch.from_numpy(np.asarray(column))
