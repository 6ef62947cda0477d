"""Measure the driver's time per generated token with vLLM, with log-probabilities as objects or as flat lists.

    python scripts/bench_vllm_outputs.py [responses] [tokens]

The log-probabilities of one decode step pass vLLM's `LogprobsProcessor`, one request after the other, as in a run. Then
all responses are converted to a batch: with objects token by token, with flat lists by plugins/vllm/options.py. No
model runs. Prints microseconds per token, best of three.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from vllm.logprobs import create_sample_logprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from plugins.vllm.options import completions

REPEATS = 3


def processed(responses: int, tokens: int, is_flat: bool) -> list[Any]:
    """Return completions as vLLM returns them, built token by token from the arrays of its sampler."""
    rng = np.random.default_rng(0)
    token_id = rng.integers(0, 150_000, (responses, tokens), dtype=np.int32)
    logprob = -rng.random((responses, tokens), dtype=np.float32)
    rank = np.ones((responses, tokens), dtype=np.int32)
    processors = [
        LogprobsProcessor(
            tokenizer=None,
            cumulative_logprob=0.0,
            logprobs=create_sample_logprobs(is_flat),
            prompt_logprobs=None,
            num_logprobs=0,
            num_prompt_logprobs=None,
        )
        for _ in range(responses)
    ]
    for step in range(tokens):
        one = slice(step, step + 1)
        for row, processor in enumerate(processors):
            processor._update_sample_logprobs(
                LogprobsLists(token_id[row, one, None], logprob[row, one, None], rank[row, one])
            )
    return [
        SimpleNamespace(token_ids=row.tolist(), logprobs=processor.logprobs, finish_reason="stop")
        for row, processor in zip(token_id, processors, strict=True)
    ]


def objects_to_batch(outputs: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and log-probabilities read from one dict and one object per token."""
    logprobs = [
        [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
        for output in outputs
    ]
    return torch.tensor([output.token_ids for output in outputs]), torch.tensor(logprobs)


def main() -> None:
    """Print the table."""
    responses, tokens = (int(word) for word in sys.argv[1:]) if len(sys.argv) == 3 else (256, 200)
    total = responses * tokens
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    print(f"{responses} responses of {tokens} tokens: us per token in vLLM's output processing, and into the batch")
    for is_flat in (False, True):
        best = [float("inf"), float("inf")]
        batch = (torch.empty(0), torch.empty(0))
        for _ in range(REPEATS):
            began = time.perf_counter()
            outputs = processed(responses, tokens, is_flat)
            built = time.perf_counter()
            if is_flat:
                made = completions(outputs, tokens)
                batch = made.tokens_BK, made.logprob_BK
            else:
                batch = objects_to_batch(outputs)
            best = [min(best[0], built - began), min(best[1], time.perf_counter() - built)]
        batches.append(batch)
        print(f"{'flat lists' if is_flat else 'objects':12}{best[0] / total * 1e6:8.2f}{best[1] / total * 1e6:8.2f}")
    # A faster conversion is worth nothing if it gives another batch.
    assert all(torch.equal(before, after) for before, after in zip(*batches, strict=True))


if __name__ == "__main__":
    main()
