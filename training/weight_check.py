"""Does an engine sample from the weights that the trainer has? Its greedy answers, judged by the trainer, say it.

Legend: `B` answers, `N` all their tokens end to end, `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from components.batch import Batch

COLD = 1e-3
"""At this temperature the log-probability of a token, times it, is how far the token is behind the likeliest one, in
nats, to within COLD * log V."""
TOLERANCE = {"float32": 0.01, "bfloat16": 0.5}
"""Nats by which engines may differ, by the precision of their products: what rounding does, and far less than a wrong
weight."""


def greedy_prompts(samples: Batch, count: int) -> Batch:
    """The first `count` prompts of some samples, as an engine takes them, over and over if there are fewer."""
    rows = [i % len(samples) for i in range(count)]
    tokens = [samples.row(i, "tokens")[: int(samples["prompt_length"][i])].tolist() for i in rows]
    ids = torch.arange(count)
    return Batch.from_rows({"tokens": tokens}, {"prompt_id": ids, "sample_id": torch.zeros_like(ids)})


def check_greedy(answers: Batch, logprob_N: Tensor, cold_logprob_N: Tensor, precision: str) -> str:
    """See that the trainer would have given the same greedy answers.

    Args:
        answers: drawn greedily, with `action_mask` and `rollout_logprob`.
        logprob_N: what the trainer says of their tokens at temperature 1, in nats.
        cold_logprob_N: and at temperature COLD.
        precision: the lower one of trainer and engine, "float32" or "bfloat16".

    Returns:
        How close they are, in a sentence.

    Raises:
        RuntimeError: the engine has other weights.
    """
    mask_N, tolerance = answers["action_mask"], TOLERANCE[precision]
    behind_N = (COLD * cold_logprob_N).abs() * mask_N
    gap_N = (logprob_N - answers["rollout_logprob"]).abs() * mask_N
    behind, gap = float(behind_N.max()), float(gap_N.max())
    found = (
        f"{len(answers)} greedy responses of {int(mask_N.sum())} tokens: log-probs differ by at most {gap:.2g}, "
        f"tokens are behind the policy's likeliest by at most {behind:.2g} nats"
    )
    # Written so that NaN fails too.
    if not (behind <= tolerance and gap <= tolerance):
        worst = int((behind_N if behind > tolerance else gap_N).nan_to_num(float("inf")).argmax())
        row = int(answers.sequence_ids[worst])
        raise RuntimeError(
            f"the engines do not sample from the policy's weights: {found}, more than {tolerance}; the worst is token "
            f"{worst - int(answers.offsets[row])} of response {row}"
        )
    return found
