"""Measure the speed of training the tiny model on packed sequences, compared with padded ones.

    python scripts/bench_packing.py                   uneven sequences, then groups of responses to a prompt
    python scripts/bench_packing.py --rounds 3

It alternates forward and backward passes of the log-probabilities on one thread. "padded" is one batch of all
sequences; "padded, sorted" has micro-batches of similar lengths within a token limit, as an engine without packing;
"packed, whole" computes every sequence; "packed" computes common prefixes once. Token counts exclude padding. Seconds
are medians of CPU time, and "against padded" is the ratio of medians. Exit code 1: packing is less than 3 times as fast
as the padded batch of uneven sequences, or less than 1.8 times with prompts of 128 tokens.
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
from components.models.causal import token_logprobs  # noqa: E402
from components.models.freed_memory import keep_freed_memory  # noqa: E402
from components.models.head import has_plain_head, mark_plain_head  # noqa: E402
from components.models.packing.layout import END_TO_END, set_layout  # noqa: E402
from components.models.packing.packed_model import use_packing  # noqa: E402
from plugins.demo.tiny_model import character_tokenizer, tiny_model  # noqa: E402

SEQUENCES = 32
MEAN = 135
LONGEST = 480
BUDGET = 2048
GROUPS = {"short prompts": (12, 16), "prompts of 128": (128, 64)}
"""Number of tokens per prompt and per response, for 16 prompts with 8 responses each."""
BARS = {"uneven": 3.0, "prompts of 128": 1.8}


def uneven() -> Batch:
    """Return sequences of which most are short and a few very long, like completions."""
    generator = torch.Generator().manual_seed(0)
    raw_B = torch.empty(SEQUENCES).exponential_(generator=generator)
    raw_B = (raw_B / raw_B.mean() * MEAN).clamp(8, LONGEST)
    # Clamping reduced the mean, so it is scaled once more.
    lengths_B = (raw_B * MEAN / raw_B.mean()).clamp(8, LONGEST).round().long()
    # The longest one decides the width of the padded batch, so it must not depend on the random numbers.
    lengths_B[lengths_B.argmax()] = LONGEST
    tokens_N = torch.randint(3, 30, (int(lengths_B.sum()),), generator=generator)
    return Batch(lengths_B, {"tokens": tokens_N})


def groups(prompt: int, response: int) -> Batch:
    """Return 16 prompts, each with 8 responses of the same length."""
    generator = torch.Generator().manual_seed(0)
    prompt_PT = torch.randint(3, 30, (16, prompt), generator=generator).repeat_interleave(8, 0)
    response_BT = torch.randint(3, 30, (len(prompt_PT), response), generator=generator)
    return Batch.from_rows({"tokens": torch.cat([prompt_PT, response_BT], 1).tolist()})


def forward_and_backward(model: nn.Module, batches: list[Batch]) -> None:
    for batch in batches:
        token_logprobs(model, batch).logprob_N.sum().backward()
    model.zero_grad()


def medians(batch: Batch, rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of each way."""
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz ")
    padded, packed, whole = (tiny_model(tokenizer, seed=0, layers=4) for _ in range(3))
    for model in (padded, packed, whole):
        mark_plain_head(model, has_plain_head(model))
    keep_freed_memory(whole)  # as load_policy does
    use_packing(packed)
    use_packing(whole)
    set_layout(whole, END_TO_END)
    by_length = [batch.select(index) for index in batch.micro_batch_indices(BUDGET)]
    ways: dict[str, Callable[[], None]] = {
        "padded": partial(forward_and_backward, padded, [batch]),
        "padded, sorted": partial(forward_and_backward, padded, by_length),
        "packed, whole": partial(forward_and_backward, whole, [batch]),
        "packed": partial(forward_and_backward, packed, [batch]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 1):
        for name, work in ways.items():
            start = time.process_time()
            work()
            if i:  # the first round is a warm-up
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> int:
    """Run the benchmark, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    cases = {"uneven": uneven()} | {name: groups(*sizes) for name, sizes in GROUPS.items()}
    is_slow = False
    print("| sequences | way | CPU seconds, median | tokens per second | against padded |\n|---|---|---|---|---|")
    for case, batch in cases.items():
        median = medians(batch, rounds)
        sizes = f"{len(batch)} of {batch.num_tokens} tokens"
        for name, middle in median.items():
            rate = batch.num_tokens / middle
            ratio = median["padded"] / middle
            print(f"| {case}, {sizes} | {name} | {middle:.3f} | {rate:,.0f} | {ratio:.2f} |")
        is_slow |= median["padded"] / median["packed"] < BARS.get(case, 0.0)
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
