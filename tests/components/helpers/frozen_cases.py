"""Log-probabilities of policy and reference before the first update: the work of a rank in test_frozen.py."""

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.batch import Batch
from components.models.causal import policy_logprobs, token_logprobs
from components.models.disk.blocks import local_part
from components.models.loading import load_policy
from components.models.state_values import state_values
from components.models.value_model import load_value_model
from components.rl.aggregation import LossOutput, Totals
from components.train.config import FrozenConfig, PassLimits, weight_type
from components.train.frozen import FrozenEngine
from components.train.opening import open_engine
from components.train.process_group import init_process_group
from tests.components.helpers import train_cases as cases

ENGINES: dict[str, dict[str, Any]] = {
    "zero-0": {"zero_stage": 0},
    "zero-3": {"zero_stage": 3},
    "fsdp-3": {"engine": "fsdp", "zero_stage": 3},
}
LORA = {"zero-0": "fp32", "zero-3": "bf16_autocast", "fsdp-3": "bf16"}
"""Engine -> precisions in which it has adapters."""
PRECISIONS = ("fp32", "bf16", "bf16_autocast")
LAYOUTS = ("whole", "sharded", "offloaded")
LIMITS = PassLimits(max_tokens=20)


def frozen(folder: str, precision: str, layout: str, values: bool = False) -> FrozenEngine[Any]:
    config = FrozenConfig(precision=precision, limits=LIMITS, layout=layout)
    load = load_value_model if values else load_policy
    return FrozenEngine(load(folder, weight_type(precision), packing=True, empty=layout != "whole"), config)


def own_part() -> Batch:
    """Return this rank's part of the first mini-batch.

    One rank gets all 7 sequences. Two ranks get 6 and 1, so their numbers of passes differ.
    """
    batch = cases.minibatches()[0]
    return batch if dist.get_world_size() == 1 else batch.select([slice(0, 6), slice(6, 7)][dist.get_rank()])


def reference(folder: str, precision: str, layout: str) -> dict[str, Any]:
    engine = frozen(folder, precision, layout)
    record: dict[str, Any] = {"logprobs": engine.forward(own_part(), policy_logprobs)}
    record["again"] = engine.forward(own_part(), policy_logprobs)
    held = [local_part(parameter).untyped_storage() for parameter in engine.model.parameters()]
    return record | {"bytes": sum(storage.nbytes() for storage in held)}


def before_the_update(folder: str, engine: str, precision: str, lora_rank: int = 0) -> dict[str, Any]:
    """Return the policy's log-probabilities, the log-ratio in the first update, and the reference without adapters."""
    gc.freeze()  # see state_engine in train_worker.py
    changes = ENGINES[engine] | {"precision": precision, "packing": True, "lora_rank": lora_rank}
    trained = open_engine(load_policy(folder, packing=True), cases.config(**changes))
    minibatch = cases.minibatches()[0]
    record: dict[str, Any] = {"logprobs": trained.forward(own_part(), policy_logprobs)}
    old_N, log_ratios = trained.forward(minibatch, policy_logprobs), list[Tensor]()

    def loss(model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        logprob_N = token_logprobs(model, micro, with_entropy=True).logprob_N
        log_ratios.append((logprob_N - micro["old"]).detach().abs().max())
        return LossOutput(-logprob_N.sum() / totals.tokens, {})

    trained.train_step(minibatch.with_tokens(old=old_N), loss)
    record["log_ratio"] = float(torch.stack(log_ratios).max())
    if lora_rank:
        trained.train_step(minibatch, cases.nll)
        for name, adapters in (("trained", True), ("adapters_off", False), ("on_again", True)):
            record[name] = trained.forward(own_part(), policy_logprobs, adapters=adapters)
    return record


def compared(folder: str) -> dict[str, Any]:
    init_process_group()
    record: dict[str, Any] = {}
    for precision in PRECISIONS:
        for layout in LAYOUTS:
            record[f"{precision}-{layout}"] = reference(folder, precision, layout)
        for engine in ENGINES:
            record[f"{precision}-{engine}"] = before_the_update(folder, engine, precision)
    for engine, precision in LORA.items():
        record[f"lora-{engine}"] = before_the_update(folder, engine, precision, lora_rank=4)
    for layout in LAYOUTS:
        values = frozen(folder, "bf16_autocast", layout, values=True)
        record[f"values-{layout}"] = values.forward(own_part(), state_values)
    return record
