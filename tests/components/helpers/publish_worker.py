"""One rank of every training engine in turn: publishes its weights, with the responses that they give."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from components.batch import Batch
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.rl.aggregation import LossOutput, Totals
from components.train import partitioned_model
from components.train.config import TrainConfig
from components.train.engine import TrainEngine
from components.train.opening import open_engine
from components.weights.publisher import WeightHandle, WeightPublisher
from tests.components.helpers.vllm_models import uneven_prompts

ENGINES = (("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("fsdp", 3))
PROMPTS, NEW_TOKENS = 6, 6
Published = tuple[str, str, WeightHandle, list[list[int]]]
"""Model, engine and stage, handle, and greedy responses of a published version."""


def nll(model: nn.Module, batch: Batch, totals: Totals) -> LossOutput:
    """Train until the batch is memorised."""
    return LossOutput(-token_logprobs(model, batch).logprob_N.sum() / totals.tokens, {})


def next_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """Return the most likely token [N] after each token."""
    likeliest_BT = model(input_ids=batch.padded("tokens", 0), use_cache=False).logits.argmax(-1)
    return batch.unpad(likeliest_BT, batch.lengths).float()


def greedy(engine: TrainEngine) -> list[list[int]]:
    """Return the greedy responses of the training engine, token by token."""
    prompts = uneven_prompts(PROMPTS)
    rows = [prompts.row(i, "tokens").tolist() for i in range(PROMPTS)]
    for _ in range(NEW_TOKENS):
        batch = Batch.from_rows({"tokens": rows})
        following_N = engine.forward(batch, next_tokens)
        rows = [[*row, int(following_N[batch.offsets[i + 1] - 1])] for i, row in enumerate(rows)]
    return [row[len(row) - NEW_TOKENS :] for row in rows]


def publish(models: Path, name_of_all: str) -> list[Published]:
    """Train, publish the weights and record the responses.

    Args:
        models: has the folders `tied` and `untied`.
        name_of_all: with it begin the folders of the versions, in shared memory.
    """
    published = []
    partitioned_model.BUCKET_BYTES = {"cpu": 2**16}
    # Every combination trains on other data, so that no two have the same weights.
    for number, (name, (library, stage)) in enumerate((name, e) for e in ENGINES for name in ("tied", "untied")):
        config = TrainConfig(engine=library, zero_stage=stage, learning_rate=0.02)
        engine = open_engine(load_policy(models / name), config)
        generator = torch.Generator().manual_seed(100 * engine.world_size + number)
        lesson = Batch.from_rows({"tokens": torch.randint(2, 20, (8, 12), generator=generator).tolist()})
        for _ in range(3):
            engine.train_step(lesson, nll)
        parameters, version = engine.gathered_parameters(), 100 * engine.world_size + number
        if engine.rank == 0:
            publisher = WeightPublisher(Path(f"/dev/shm/{name_of_all}-{version}"), bucket_bytes=2**16)
            handle = publisher.publish(version, parameters, with_digests=True)
            published.append((name, f"{library} {stage} on {engine.world_size}", handle, greedy(engine)))
        else:
            assert list(parameters) == []
            greedy(engine)
    return published
