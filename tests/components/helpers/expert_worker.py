"""GRPO updates with expert parallelism: the work of a rank in test_experts.py."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from components.batch import Batch
from components.models.disk.blocks import local_part
from components.models.loading import load_policy
from components.rl.aggregation import LossOutput, Totals
from components.train.engine import TrainEngine
from components.train.state import save_state
from plugins.resume.engine_state import load_state
from tests.components.helpers import mesh_worker
from tests.components.helpers import train_cases as cases
from tests.components.helpers.mesh_worker import SHAPE, experience, open_case, update

EXPERTS = 6
CASES: dict[str, dict[str, Any]] = {
    "packed-2": {"model": "qwen3_moe", "expert": 2, "zero_stage": 2},
    "packed-3": {"model": "qwen3_moe", "expert": 2, "zero_stage": 3, "checkpointing": True},
    "padded": {"model": "qwen3_moe", "expert": 2, "zero_stage": 3, "packing": False},
    "context": {"model": "qwen3_moe", "expert": 2, "context": 2, "zero_stage": 3, "router_aux_loss_coef": 0.1},
    "values": {"model": "qwen3_moe", "expert": 2, "zero_stage": 2, "values": True},
    "mixtral": {"model": "mixtral", "expert": 2, "zero_stage": 3},
}
"""Training cases. One process also trains each of them for comparison."""
BALANCED: dict[str, Any] = {"model": "qwen3_moe", "zero_stage": 2, "router_aux_loss_coef": 0.1}
RESUMED: dict[str, Any] = {"model": "qwen3_moe", "zero_stage": 3}


def write_models(folder: Path) -> None:
    """Write a Qwen3-MoE and a Mixtral with 6 experts, 2 of them per token. The first also has a dense layer. Also write
    models with experts that two ranks cannot divide, and one without experts.
    """
    torch.manual_seed(6)
    heads: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    qwen3: dict[str, Any] = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    uneven = SHAPE | {"num_hidden_layers": 3, "mlp_only_layers": [1]}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**uneven, **heads, **qwen3)).save_pretrained(folder / "qwen3_moe")
    mixtral: dict[str, Any] = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    MixtralForCausalLM(MixtralConfig(**SHAPE, **heads, **mixtral)).save_pretrained(folder / "mixtral")
    five: dict[str, Any] = qwen3 | {"num_experts": 5}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **heads, **five)).save_pretrained(folder / "five")
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, **heads)).save_pretrained(folder / "dense")


def trained(folder: str, expert: int, chosen: list[str]) -> dict[str, Any]:
    """Return the training record of each case. With `expert` = 1 all ranks are data-parallel."""
    records = dict[str, Any]()
    for name in chosen:
        engine = open_case(folder, CASES[name], alone=expert == 1)
        records[name] = mesh_worker.trained(engine, CASES[name].get("values", False))
    return records


def alone(folder: str, state: str, again: str) -> dict[str, Any]:
    """Work of one process: train the cases, and load and save the states of expert-parallel ranks."""
    records = trained(folder, 1, list(CASES))
    engine = open_case(folder, RESUMED, alone=True)
    records["remarks"] = load_state(engine, state)
    records["loaded"] = cases.weights(engine)
    save_state(engine, again)
    records["next"] = engine.train_step(experience(2), update)
    records["exported"] = _parameters(f"{state}/hf")
    return records


def pair(folder: str, state: str) -> dict[str, Any]:
    """Work of two ranks: train the cases, compare the balancing loss with and without the axis, measure memory, save a
    state.
    """
    records = trained(folder, 2, list(CASES))
    for name, expert in (("balanced", 1), ("balanced-2", 2)):
        engine = open_case(folder, BALANCED | {"expert": expert}, alone=False)
        records[name] = [engine.train_step(experience(step), update) for step in range(2)]
    records["memory"] = {expert: _held(folder, expert) for expert in (1, 2)}
    records["refused"] = refusals(folder)
    engine = open_case(folder, RESUMED | {"expert": 2}, alone=False)
    for step in range(2):
        engine.train_step(experience(step), update)
    save_state(engine, state)
    engine.save_hf(f"{state}/hf")
    records["saved"], records["next"] = cases.weights(engine), engine.train_step(experience(2), update)
    resumed = open_case(folder, RESUMED | {"expert": 2}, alone=False)
    records["remarks"] = load_state(resumed, state)
    records["resumed"] = resumed.train_step(experience(2), update)
    return records


def four(folder: str, state: str) -> dict[str, Any]:
    """Work of four ranks, two per group of experts: train some cases, and continue from a state of one process."""
    records = trained(folder, 2, ["packed-2", "context"])
    engine = open_case(folder, RESUMED | {"expert": 2}, alone=False)
    load_state(engine, state)
    records["loaded"] = cases.weights(engine)
    records["next"] = engine.train_step(experience(2), update)
    return records


def refusals(folder: str) -> dict[str, str]:
    """Return the error messages for settings with which ranks cannot share experts."""
    write = {"dense": {"model": "dense", "expert": 2}, "five": {"model": "five", "expert": 2}}
    messages = dict[str, str]()
    for name, case in write.items():
        try:
            open_case(folder, case | {"zero_stage": 3}, alone=False)
        except ValueError as error:
            messages[name] = str(error)
    return messages


def _held(folder: str, expert: int) -> dict[str, int]:
    """Return the bytes of this rank's parameters and moments between two steps, and of its gathered tensors after a
    forward pass without resharding.
    """
    engine = open_case(folder, BALANCED | {"expert": expert, "router_aux_loss_coef": 0.0}, alone=False)
    seen = list[int]()

    def loss(model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        output = update(model, micro, totals)
        seen.append(_nbytes(engine))
        return output

    engine.train_step(experience(0), loss)
    moments = [value for state in engine.adam.state.values() for key, value in state.items() if key != "step"]
    return {"whole": max(seen), "kept": _nbytes(engine) + sum(local_part(moment).nbytes for moment in moments)}


def _nbytes(engine: TrainEngine) -> int:
    return sum(local_part(parameter).nbytes for parameter in engine.model.parameters())


def _parameters(folder: str) -> dict[str, torch.Tensor]:
    return dict(load_policy(folder).named_parameters())
