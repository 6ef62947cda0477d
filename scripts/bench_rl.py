"""Measure the functions of components/rl on one large batch.

    python scripts/bench_rl.py                        16 million tokens, two threads
    python scripts/bench_rl.py --tokens 1000000 --threads 1 --rounds 3

The sequences have uneven lengths, and a tenth of their tokens come from the environment. It prints the minimum and the
median of the rounds in seconds. The forward pass of a loss includes its metrics and their sums; "backward" is its
gradient. On a busy machine the median is far above the minimum.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from components.rl import (  # noqa: E402 (may not be installed)
    correction,
    covariance_losses,
    kl,
    mismatch,
    policy_losses,
    ratio_losses,
    returns,
    value_losses,
)
from components.rl.aggregation import Aggregation, TokenLoss, Totals, reduce_loss  # noqa: E402

BY_RESPONSE = ("gspo", "geo_mean")
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


class Data:
    """Random columns of a batch of about `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths_B = torch.randint(64, 1984, (max(tokens // 1024, 1),), generator=generator)
        count = int(self.lengths_B.sum())
        self.mask_N = torch.rand(count, generator=generator) < 0.9
        self.reward_N = torch.randn(count, generator=generator)
        self.value_N = torch.randn(count, generator=generator)
        self.old_N = -torch.rand(count, generator=generator)
        self.logprob_N = (self.old_N + 0.1 * torch.randn(count, generator=generator)).requires_grad_()
        self.uniform_N = torch.rand(count, generator=generator)
        self.totals = Totals(tokens=int(self.mask_N.sum()), sequences=len(self.lengths_B))


def losses(data: Data) -> dict[str, Callable[[], TokenLoss]]:
    """Return name -> token loss on the batch."""
    columns = (data.logprob_N, data.old_N, data.reward_N, data.mask_N)
    covariance_N = covariance_losses.covariances(data.old_N, data.reward_N, data.mask_N)
    held_N = covariance_losses.kl_cov_tokens(covariance_N, data.mask_N, share=2e-4)
    return {
        "ppo": partial(policy_losses.ppo_loss, *columns, **CLIP),
        "ppo, dual clip": partial(policy_losses.ppo_loss, *columns, **CLIP, dual_clip=3.0),
        "gspo": partial(policy_losses.gspo_loss, *columns, data.lengths_B, **CLIP),
        "geo_mean": partial(ratio_losses.geo_mean_loss, *columns, data.lengths_B, **CLIP),
        "cispo": partial(ratio_losses.cispo_loss, *columns, **CLIP),
        "sapo": partial(ratio_losses.sapo_loss, *columns),
        "dppo_tv": partial(ratio_losses.dppo_loss, *columns, divergence="tv", **CLIP),
        "dppo_kl": partial(ratio_losses.dppo_loss, *columns, divergence="kl", **CLIP),
        "clip_cov": partial(covariance_losses.clip_cov_loss, *columns, held_N, **CLIP),
        "kl_cov": partial(covariance_losses.kl_cov_loss, *columns, held_N, coef=1.0),
        "reinforce": partial(policy_losses.reinforce_loss, data.logprob_N, data.reward_N, data.mask_N),
        "value": partial(
            value_losses.clipped_value_loss, data.logprob_N, data.old_N, data.reward_N, data.mask_N, clip=0.5
        ),
    }


def whole_batch(data: Data) -> dict[str, Callable[[], object]]:
    """Return name -> function that a step computes once."""
    of_rollout = (data.old_N, data.value_N - 3, data.mask_N, data.lengths_B)
    return {
        "gae": partial(returns.gae, data.reward_N, data.value_N, data.mask_N, data.lengths_B, gamma=1.0, lambd=0.95),
        "discounted_returns": partial(
            returns.discounted_returns, data.reward_N, data.mask_N, data.lengths_B, gamma=1.0
        ),
        "turn_returns": partial(returns.turn_returns, data.reward_N, data.mask_N, data.lengths_B, gamma=1.0),
        "whiten": partial(returns.whiten, data.reward_N, data.mask_N),
        "kl_estimate k3": partial(kl.kl_estimate, data.old_N, data.value_N, data.mask_N, "k3"),
        "importance_weights": partial(
            correction.importance_weights, *of_rollout, level="token", low=0.5, high=5.0, outside="clamp"
        ),
        "mismatch_metrics": partial(mismatch.mismatch_metrics, *of_rollout),
    }


def reduced(loss: Callable[[], TokenLoss], data: Data, aggregation: Aggregation) -> Tensor:
    """Return the loss of the batch. Its metrics are aggregated too."""
    return reduce_loss(loss(), data.mask_N, data.lengths_B, data.totals, aggregation).loss


def measure(action: Callable[[], object], rounds: int) -> str:
    """Return the minimum and the median of the rounds, as text."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return f"{min(seconds):8.2f} {statistics.median(seconds):8.2f}"


def main() -> None:
    """Print a row per function."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16 * 2**20, help="approximate number of tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = Data(options.tokens)
    print(f"{len(data.mask_N):,} tokens in {len(data.lengths_B):,} sequences, {options.threads} threads")
    print(f"{'':24} {'best':>8} {'median':>8}   {'best':>8} {'median':>8} backward")
    for name, action in whole_batch(data).items():
        print(f"{name:24} {measure(action, options.rounds)}", flush=True)
    aggregations: dict[str, Aggregation] = dict.fromkeys(BY_RESPONSE, "seq-mean-token-mean")
    for name, loss in losses(data).items():
        forward = partial(reduced, loss, data, aggregations.get(name, "token-mean"))
        ahead = measure(forward, options.rounds)
        # One graph for all rounds, so that they measure only the backward pass.
        graph = forward()
        behind = measure(partial(torch.autograd.grad, graph, data.logprob_N, retain_graph=True), options.rounds)
        print(f"{name:24} {ahead}   {behind}", flush=True)


if __name__ == "__main__":
    main()
