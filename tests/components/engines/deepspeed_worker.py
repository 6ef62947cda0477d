"""One rank of the DeepSpeed tests: everything that needs a DeepSpeed process, done once; the tests read the record.

Usage: deepspeed_worker.py MODEL_FOLDER OUTPUT_FOLDER, with or without RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from components.batch import Batch
from components.engines.causal import load_policy, load_value_model, token_logprobs, token_values
from components.engines.deepspeed_engine import DeepSpeedConfig, DeepSpeedEngine, Totals, init_process_group
from components.engines.weight_sync import WeightPublisher
from components.rl.policy_losses import LossOutput

LEARNING_RATE = 0.01
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0
BETAS = (0.9, 0.95)
# Large, or Adam would turn the rounding of gradients that are almost 0 into whole steps.
EPS = 1e-3
STEPS = 3


def ragged(seed: int, count: int) -> Batch:
    """Sequences of 2 to 9 tokens, of which about half are trained on."""
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(2, 10, (count,), generator=generator)
    size = int(lengths_B.sum())
    mask_N = torch.rand(size, generator=generator) < 0.5
    mask_N[1] = True
    tokens_N = torch.randint(2, 20, (size,), generator=generator)
    return Batch(lengths_B, {"tokens": tokens_N, "loss_mask": mask_N})


def minibatches() -> list[Batch]:
    """Of 7, 5 and 1 sequences: on two ranks unequal shares, and once none for the second rank."""
    return [ragged(1, 7), ragged(2, 5), ragged(3, 1)]


def evaluated() -> list[Batch]:
    """What is evaluated, in the parts in which two ranks get it: 6 sequences and 1."""
    whole = ragged(4, 7)
    return [whole.select(slice(0, 6)), whole.select(slice(6, 7))]


def config(**changes: Any) -> DeepSpeedConfig:
    settings: dict[str, Any] = {
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "max_norm": MAX_NORM,
        "betas": BETAS,
        "eps": EPS,
        "lr_scheduler": "linear",
        "total_steps": 4,
        "max_tokens": 20,
    }
    return DeepSpeedConfig(**(settings | changes))


def nll(model: nn.Module, batch: Batch, totals: Totals) -> LossOutput:
    logprob_N = token_logprobs(model, batch).logprob_N
    loss = -torch.where(batch["loss_mask"], logprob_N, 0.0).sum() / totals.tokens
    share = batch["loss_mask"].sum() / totals.tokens
    return LossOutput(
        loss=loss, metrics={"token_share": share, "sequence_share": torch.tensor(len(batch) / totals.sequences)}
    )


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
    # The root's slope at 0 is infinite.
    return LossOutput(loss=(nll(model, batch, totals).loss * 0.0).abs().sqrt(), metrics={})


def logprobs(model: nn.Module, batch: Batch) -> Tensor:
    return token_logprobs(model, batch).logprob_N


def weights(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    # Little at a time, so that zero_stage 3 gathers in several goes.
    return {name: tensor.clone() for name, tensor in engine.gathered_parameters(max_bytes=40_000)}


def own_part(engine: DeepSpeedEngine) -> Batch:
    parts = evaluated()
    return parts[engine.rank] if engine.world_size == 2 else Batch.concat(parts)


def train(engine: DeepSpeedEngine, loss_fn: Callable[..., LossOutput] = nll) -> dict[str, Any]:
    compute = logprobs if loss_fn is nll else token_values
    record: dict[str, Any] = {"before": engine.forward(own_part(engine), compute)}
    record["metrics"] = [engine.train_step(minibatch, loss_fn) for minibatch in minibatches()]
    record["after"] = engine.forward(own_part(engine), compute)
    record["weights"] = weights(engine)
    record["step_count"] = engine.step_count
    return record


def failure(engine: DeepSpeedEngine, loss_fn: Callable[..., LossOutput]) -> dict[str, Any]:
    # After a good step, whose norm is not to be taken for that of the bad one.
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


def counted_forwards(engine: DeepSpeedEngine) -> dict[str, list[int]]:
    """Sequences of each micro-batch, without gradients and with them."""
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


def tokenizer() -> PreTrainedTokenizerFast:
    words = {letter: i for i, letter in enumerate("_$^abcdefghijklmnopq")}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="_")), eos_token="$")


def main(model_folder: str, output: Path) -> None:
    torch.set_num_threads(1)

    def engine(**changes: Any) -> DeepSpeedEngine:
        return DeepSpeedEngine(load_policy(model_folder), config(**changes))

    record: dict[str, Any] = {}
    # bf16 trains with zero_stage 1 where 0 is asked for, so that one of the two is enough.
    for stage in (0, 2, 3):
        record[f"bf16-{stage}"] = train(engine(zero_stage=stage, precision="bf16"))
    for stage in (0, 1, 2, 3):
        trained = engine(zero_stage=stage)
        record[f"fp32-{stage}"] = train(trained)
    trained.save_hf(output / "hf", tokenizer())
    published = trained.gathered_parameters()
    if trained.rank == 0:
        record["handle"] = WeightPublisher(output / "weights").publish(1, published)
    assert not list(published)  # exhausts it on the other ranks, since gathering is collective
    record["large_micro_batches"] = train(engine(max_tokens=10**6))
    # Training cuts 7, 5 and 1 sequences by two, evaluation takes one at a time.
    record["few_sequences"] = train(engine(zero_stage=3, max_sequences=2, forward_max_sequences=1))
    record["forward_tokens"] = counted_forwards(engine(forward_max_tokens=1, max_sequences=2))
    for stage in (0, 3):
        still = engine(zero_stage=stage, learning_rate=0.0)
        record[f"learning_rate_0-{stage}"] = {"start": weights(still), **train(still)}
    record["offload"] = train(engine(zero_stage=2, adam_offload=True))
    record["nan"] = failure(engine(zero_stage=2), nan_in_the_longest)
    for stage in (0, 1, 2, 3):
        record[f"infinite_gradient-{stage}"] = failure(engine(zero_stage=stage), infinite_gradient)
    record["infinite_gradient-bf16"] = failure(engine(precision="bf16"), infinite_gradient)
    value = DeepSpeedEngine(load_value_model(model_folder), config(zero_stage=3))
    record["value"] = train(value, squared_error)
    value.save_hf(output / "value")
    os.environ["WORLD_SIZE"] = "5"
    try:
        init_process_group()
    except ValueError as error:
        record["group"] = str(error)
    torch.save(record, output / f"rank{value.rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    # As init_process_group advises a rank to end.
    sys.stdout.flush()
    os._exit(0)
