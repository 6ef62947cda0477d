"""How fast the tiny model trains on sequences end to end in one row, beside the same sequences padded.

    python scripts/bench_packing.py                   32 sequences, 135 tokens on average, the longest 480
    python scripts/bench_packing.py --rounds 3

Forward and backward pass of the log-probabilities on one thread, in turns. "padded" is one batch of all sequences,
"padded, sorted" micro-batches of like lengths under a budget, as an engine cuts them without packing. Tokens are real
ones, padding left out, and seconds medians; "against padded" is the ratio of the medians. Exits 1 where packing is less
than 3 times as fast as the padded batch.
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
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from components.batch import Batch  # noqa: E402 (may not be installed)
from components.data.tiny_model import character_tokenizer, tiny_model  # noqa: E402
from components.engines.causal import keep_freed_memory, token_logprobs  # noqa: E402
from components.engines.head_logprobs import has_plain_head, mark_plain_head  # noqa: E402
from components.engines.packing import use_packing  # noqa: E402

SEQUENCES, MEAN, LONGEST = 32, 135, 480
BUDGET = 2048
BAR = 3.0


def uneven() -> Batch:
    """Most sequences are short and a few very long, as completions are."""
    generator = torch.Generator().manual_seed(0)
    raw_B = torch.empty(SEQUENCES).exponential_(generator=generator)
    raw_B = (raw_B / raw_B.mean() * MEAN).clamp(8, LONGEST)
    # Clamping took from the long ones.
    lengths_B = (raw_B * MEAN / raw_B.mean()).clamp(8, LONGEST).round().long()
    lengths_B[lengths_B.argmax()] = LONGEST
    tokens_N = torch.randint(3, 30, (int(lengths_B.sum()),), generator=generator)
    return Batch(lengths_B, {"tokens": tokens_N})


def forward_and_backward(model: nn.Module, batches: list[Batch]) -> None:
    for batch in batches:
        token_logprobs(model, batch).logprob_N.sum().backward()
    model.zero_grad()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    batch = uneven()
    # What load_policy does, without files.
    keep_freed_memory()
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz ")
    padded, packed = (tiny_model(tokenizer, seed=0, layers=4) for _ in range(2))
    for model in (padded, packed):
        mark_plain_head(model, has_plain_head(model))
    use_packing(packed)
    by_length = [batch.select(index) for index in batch.micro_batch_indices(BUDGET)]
    ways: dict[str, Callable[[], None]] = {
        "padded": partial(forward_and_backward, padded, [batch]),
        "padded, sorted": partial(forward_and_backward, padded, by_length),
        "packed": partial(forward_and_backward, packed, [batch]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 1):
        for name, work in ways.items():
            start = time.perf_counter()
            work()
            if i:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    longest = int(batch.lengths.max())
    print(f"{len(batch)} sequences, {batch.num_tokens} tokens, the longest {longest}; one thread, {rounds} rounds\n")
    print("| way | seconds, median | best | tokens per second | against padded |\n|---|---|---|---|---|")
    for name, middle in median.items():
        rate, ratio = batch.num_tokens / middle, median["padded"] / middle
        print(f"| {name} | {middle:.3f} | {min(seconds[name]):.3f} | {rate:,.0f} | {ratio:.2f} |")
    return 0 if median["padded"] / median["packed"] >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
