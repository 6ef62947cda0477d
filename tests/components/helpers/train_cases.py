"""Data, settings and records of the training tests."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from components.batch import Batch
from components.models.causal import token_logprobs
from components.models.state_values import token_values
from components.rl.aggregation import LossOutput, Totals
from components.rl.masked import sequence_sums
from components.train import partitioned_model
from components.train.config import TrainConfig
from components.train.engine import TrainEngine

LEARNING_RATE = 0.01
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0
BETAS = (0.9, 0.95)
# A large epsilon. Otherwise Adam would scale rounding errors of gradients near 0 to complete steps.
EPS = 1e-3
STEPS = 3


def ragged(seed: int, count: int) -> Batch:
    """Sequences of 2 to 9 tokens. About half of the tokens are trained on."""
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(2, 10, (count,), generator=generator)
    size = int(lengths_B.sum())
    mask_N = torch.rand(size, generator=generator) < 0.5
    mask_N[1] = True
    tokens_N = torch.randint(2, 20, (size,), generator=generator)
    return Batch(lengths_B, {"tokens": tokens_N, "loss_mask": mask_N})


def minibatches() -> list[Batch]:
    """Return mini-batches of 7, 5 and 1 sequences.

    Two ranks get unequal shares, and the second rank gets none of the last mini-batch.
    """
    return [ragged(1, 7), ragged(2, 5), ragged(3, 1)]


def evaluated() -> list[Batch]:
    """Return the rows of each rank in the evaluated batch: two ranks get 6 sequences and 1."""
    whole = ragged(4, 7)
    return [whole.select(slice(0, 6)), whole.select(slice(6, 7))]


def config(**changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_NORM,
        "betas": BETAS,
        "eps": EPS,
        "lr_scheduler": "linear",
        "total_steps": 4,
        "max_tokens": 20,
    }
    return TrainConfig(**(settings | changes))


def nll(model: nn.Module, batch: Batch, totals: Totals) -> LossOutput:
    logprob_N = token_logprobs(model, batch).logprob_N
    loss = -torch.where(batch["loss_mask"], logprob_N, 0.0).sum() / totals.tokens
    tokens_B = sequence_sums(batch["loss_mask"].float(), batch.lengths)
    shares = {"token_share": tokens_B.sum() / totals.tokens, "sequence_share": (tokens_B > 0).sum() / totals.sequences}
    return LossOutput(loss=loss, metrics=shares)


def squared_error(model: nn.Module, batch: Batch, totals: Totals) -> LossOutput:
    error_N = token_values(model, batch) - batch["tokens"] / 20
    return LossOutput(loss=torch.where(batch["loss_mask"], error_N**2, 0.0).sum() / totals.tokens, metrics={})


def nan_in_the_longest(model: nn.Module, batch: Batch, totals: Totals) -> LossOutput:
    output = nll(model, batch, totals)
    spoilt = int(batch.lengths.max()) == int(minibatches()[0].lengths.max())
    spoilt_share = output.metrics["token_share"] * (float("inf") if spoilt else 1.0)
    return LossOutput(
        loss=output.loss * (float("nan") if spoilt else 1.0), metrics=output.metrics | {"token_share": spoilt_share}
    )


def infinite_gradient(model: nn.Module, batch: Batch, totals: Totals) -> LossOutput:
    # The derivative of the square root at 0 is infinite.
    return LossOutput(loss=(nll(model, batch, totals).loss * 0.0).abs().sqrt(), metrics={})


def logprobs(model: nn.Module, batch: Batch) -> Tensor:
    return token_logprobs(model, batch).logprob_N


def weights(engine: TrainEngine) -> dict[str, Tensor]:
    # A small limit, so that ZeRO 3 gathers in several parts.
    partitioned_model.BUCKET_BYTES = {"cpu": 40_000}
    return {name: tensor.clone() for name, tensor in engine.gathered_parameters()}


def own_part(engine: TrainEngine) -> Batch:
    parts = evaluated()
    return parts[engine.rank] if engine.world_size == 2 else Batch.concat(parts)


def train(engine: TrainEngine, loss_fn: Callable[..., LossOutput] = nll) -> dict[str, Any]:
    compute = token_values if loss_fn is squared_error else logprobs
    record: dict[str, Any] = {"before": engine.forward(own_part(engine), compute)}
    record["metrics"] = [engine.train_step(minibatch, loss_fn) for minibatch in minibatches()]
    record["after"] = engine.forward(own_part(engine), compute)
    record["weights"] = weights(engine)
    record["step_count"] = engine.step_count
    return record


def failure(engine: TrainEngine, loss_fn: Callable[..., LossOutput]) -> dict[str, Any]:
    # After a good step, whose norm must not be reported for the bad one.
    engine.train_step(minibatches()[1], nll)
    before, message = weights(engine), "no error"
    try:
        engine.train_step(minibatches()[0], loss_fn)
    except FloatingPointError as error:
        message = str(error)
    after = weights(engine)
    return {
        "message": message,
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "step_count": engine.step_count,
    }


def counted_forwards(engine: TrainEngine) -> dict[str, list[int]]:
    """Number of sequences of each micro-batch, without gradients and with them."""
    sizes: dict[str, list[int]] = {"forward": [], "training": []}

    def compute(model: nn.Module, batch: Batch) -> Tensor:
        sizes["forward"].append(len(batch))
        return logprobs(model, batch)

    def loss(model: nn.Module, batch: Batch, totals: Totals) -> LossOutput:
        sizes["training"].append(len(batch))
        return nll(model, batch, totals)

    engine.forward(own_part(engine), compute)
    engine.train_step(minibatches()[1], loss)
    return sizes


FSDP: dict[str, dict[str, Any]] = {
    **{f"fsdp-{stage}": {"zero_stage": stage} for stage in (2, 3)},
    **{f"fsdp-large_micro_batches-{stage}": {"zero_stage": stage, "max_tokens": 10**6} for stage in (2, 3)},
    "fsdp-few_sequences": {"zero_stage": 2, "max_sequences": 2, "forward_max_sequences": 1},
    "fsdp-offload": {"zero_stage": 3, "adam_offload": True},
    **{f"fsdp-bf16-{stage}": {"zero_stage": stage, "precision": "bf16"} for stage in (2, 3)},
    "fsdp-learning_rate_0": {"zero_stage": 2, "learning_rate": 0.0},
}
"""FSDP cases, in addition to those of DeepSpeed."""
SAVED = ("fsdp-3", "fsdp-bf16-2")
"""FSDP cases whose model is saved for transformers."""
