"""GRPO updates on meshes of ranks: the work of a rank in test_axes.py.

Legend: `N` all tokens of a batch end to end.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from components.batch import Batch
from components.models import head as head_logprobs
from components.models import logprobs
from components.models.causal import token_logprobs
from components.models.disk.blocks import local_part
from components.models.loading import load_policy
from components.models.state_values import token_values
from components.models.value_model import load_value_model
from components.rl.aggregation import LossOutput, Totals
from components.rl.policy_losses import ppo_loss
from components.train.engine import TrainEngine
from components.train.opening import open_engine
from components.train.state import save_state
from plugins.resume.engine_state import load_state
from tests.components.helpers import train_cases as cases
from tests.components.helpers.shared_cases import groups

STEPS = 5
LONG = 32_768
TEMPERATURE = 0.7
SHAPE: dict[str, Any] = {
    "vocab_size": 20,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
CONTEXT: dict[str, dict[str, Any]] = {
    "qwen2-2": {"model": "qwen2", "context": 2, "zero_stage": 2},
    "qwen2-3": {"model": "qwen2", "context": 2, "zero_stage": 3, "checkpointing": True},
    "llama-3": {"model": "llama", "context": 2, "zero_stage": 3},
    "qwen2-value": {"model": "qwen2", "context": 2, "zero_stage": 3, "values": True},
    "qwen2-whole": {"model": "qwen2", "context": 2, "zero_stage": 3, "logits": True},
}
"""Training cases of the meshes. One process also trains each of them for comparison."""
TENSOR: dict[str, dict[str, Any]] = {
    "qwen2-tensor-2": {"model": "qwen2", "tensor": 2, "zero_stage": 2, "checkpointing": True},
    "llama-tensor-3": {"model": "llama", "tensor": 2, "zero_stage": 3, "chunks": True},
    "llama-tensor-padded": {"model": "llama", "tensor": 2, "zero_stage": 3, "packing": False},
    "qwen2-tensor-whole": {"model": "qwen2", "tensor": 2, "zero_stage": 3, "logits": True},
    "qwen3-tensor-value": {"model": "qwen3", "tensor": 2, "zero_stage": 3, "values": True},
}
BOTH: dict[str, dict[str, Any]] = {"qwen2-both": {"model": "qwen2", "context": 2, "tensor": 2, "zero_stage": 3}}
"""For 4 ranks."""
RESUMED = "llama-tensor-3"
"""Case whose state is saved after training."""


def write_models(folder: Path) -> None:
    """Write a tied Qwen2 with 4 heads and 2 key heads, a Llama with 6 heads and 3 key heads, which 2 does not divide,
    one with 3 heads, and a small one with many positions.
    """
    torch.manual_seed(5)
    qwen2: dict[str, Any] = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    Qwen2ForCausalLM(Qwen2Config(**SHAPE, **qwen2)).save_pretrained(folder / "qwen2")
    llama: dict[str, Any] = {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "tie_word_embeddings": False,
    }
    LlamaForCausalLM(LlamaConfig(**SHAPE, **llama)).save_pretrained(folder / "llama")
    three: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, **three, tie_word_embeddings=True)).save_pretrained(folder / "qwen3")
    gpt2 = GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, bos_token_id=2, eos_token_id=1)
    GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt2")
    odd: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    LlamaForCausalLM(LlamaConfig(**SHAPE, **odd)).save_pretrained(folder / "odd")
    long: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4}
    one = SHAPE | {"num_hidden_layers": 1, "max_position_embeddings": LONG, "intermediate_size": 32}
    LlamaForCausalLM(LlamaConfig(**one, **long)).save_pretrained(folder / "long")


def experience(step: int) -> Batch:
    """Groups of responses with advantages, as GRPO trains on them; the last step has a single prompt."""
    batch = groups(10 + step, 1 if step == STEPS - 1 else 4, 4)
    generator = torch.Generator().manual_seed(step)
    columns = {name: torch.randn(batch.num_tokens, generator=generator) for name in ("advantage", "old")}
    return batch.with_tokens(advantage=columns["advantage"], old_noise=0.1 * columns["old"])


def update(model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
    """Return PPO's clipped surrogate with an entropy bonus, as a mean over the tokens of the step."""
    output = token_logprobs(model, micro, TEMPERATURE, with_entropy=True)
    assert output.entropy_N is not None
    mask_N = micro["loss_mask"]
    old_N = output.logprob_N.detach() + micro["old_noise"]
    tokens = ppo_loss(output.logprob_N, old_N, micro["advantage"], mask_N, clip_low=0.2, clip_high=0.2)
    loss_N = tokens.loss_N - 0.1 * output.entropy_N
    entropy = torch.where(mask_N, output.entropy_N, 0.0).sum() / totals.tokens
    return LossOutput(torch.where(mask_N, loss_N, 0.0).sum() / totals.tokens, {"entropy": entropy.detach()})


def saved_bytes(engine: TrainEngine, batch: Batch) -> int:
    """Return the bytes that a forward pass saves for its backward pass, including the few weights of a small model."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = token_logprobs(engine.model, batch)
    assert output.logprob_N.requires_grad
    return sum(kept.values())


def activations(folder: str, *meshes: dict[str, int]) -> list[int]:
    """Return the activation bytes per mesh of one sequence of 32,768 tokens, which the ranks of a mesh share."""
    sizes = []
    for axes in meshes:
        model = load_policy(f"{folder}/long", packing=True)
        engine = open_engine(model, cases.config(engine="fsdp", zero_stage=3, packing=True, **axes))
        tokens_N = torch.randint(2, 20, (LONG,), generator=torch.Generator().manual_seed(0))
        sizes.append(saved_bytes(engine, Batch(torch.tensor([LONG]), {"tokens": tokens_N})))
    return sizes


def refusals(folder: str) -> dict[str, str]:
    """Return the error messages for settings with which two ranks cannot divide the rows of a model."""
    messages = dict[str, str]()
    meshes = {
        "odd": ("odd", True, {"context": 2}),
        "qwen2": ("qwen2", False, {"context": 2}),
        "odd-tensor": ("odd", True, {"tensor": 2}),
        "gpt2-tensor": ("gpt2", False, {"tensor": 2}),
    }
    for name, (path, packing, axes) in meshes.items():
        config = cases.config(engine="fsdp", zero_stage=3, **axes)
        try:
            open_engine(load_policy(f"{folder}/{path}", packing=packing), config)
        except ValueError as error:
            messages[name] = str(error)
    return messages


def open_case(folder: str, case: dict[str, Any], *, alone: bool) -> TrainEngine:
    """Return the engine of a case. It is alone if the only axis is that of the data."""
    settings = dict(case)
    path, values = f"{folder}/{settings.pop('model')}", settings.pop("values", False)
    loading = {"gradient_checkpointing": settings.pop("checkpointing", False), "packing": settings.get("packing", True)}
    reads_logits = settings.pop("logits", False)
    # Few rows per chunk, so that a micro-batch takes several chunks.
    small = settings.pop("chunks", False)
    head_logprobs._CHUNK = {"cpu": (1, 7)} if small else {}
    logprobs._CHUNK_ELEMENTS = {"cpu": 30} if small else {}
    for axis in ("context", "expert", "tensor") if alone else ():
        settings.pop(axis, None)
    model: Any = load_value_model(path, **loading) if values else load_policy(path, **loading, empty=True)
    if reads_logits:
        model.logprobs_from_states = False
    return open_engine(model, cases.config(engine="fsdp", **({"max_tokens": 100, "packing": True} | settings)))


def trained(engine: TrainEngine, values: bool) -> dict[str, Any]:
    """Train five optimizer steps. Return the model's outputs for the rank's own sequences before and after them."""

    def compute(model: nn.Module, batch: Batch) -> torch.Tensor:
        return token_values(model, batch) if values else token_logprobs(model, batch, TEMPERATURE).logprob_N

    whole = groups(1, 3, 3)
    part = whole.split(engine.world_size)[engine.rank]
    record: dict[str, Any] = {"before": engine.forward(part, compute)}
    loss = cases.squared_error if values else update
    record["metrics"] = [engine.train_step(experience(step), loss) for step in range(STEPS)]
    record["after"] = engine.forward(part, compute)
    record["weights"] = cases.weights(engine)
    return record


def kept_bytes(engine: TrainEngine) -> int:
    """Return the bytes of the weights and moments of this rank."""
    moments = [moment for state_of in engine.adam.state.values() for name, moment in state_of.items() if name != "step"]
    return sum(local_part(tensor).nbytes for tensor in [*engine.model.parameters(), *moments])


def resumed(folder: str, states: list[str], alone: bool) -> dict[str, Any]:
    """Return, for each saved state, its weights, the result of one more optimizer step, and the export."""
    records = dict[str, Any]()
    for state in states:
        engine = open_case(folder, TENSOR[RESUMED], alone=alone)
        remarks = load_state(engine, f"{folder}/{state}")
        record: dict[str, Any] = {"remarks": remarks, "weights": cases.weights(engine)}
        record["metrics"] = engine.train_step(experience(0), update)
        engine.save_hf(f"{folder}/exported-{engine.world_size}-{state}")
        record["after"] = cases.weights(engine)
        records[state] = record
    return records


def trained_on_mesh(folder: str, chosen: dict[str, dict[str, Any]], alone: bool) -> dict[str, Any]:
    """Return the training record of each case."""
    records = dict[str, Any]()
    for name, case in chosen.items():
        engine = open_case(folder, case, alone=alone)
        together = 1 if alone else case.get("context", 1) * case.get("tensor", 1)
        assert engine.axes.data * together == engine.world_size
        records[name] = trained(engine, case.get("values", False))
        records[name]["bytes"] = kept_bytes(engine)
        if name == RESUMED:
            save_state(engine, f"{folder}/state-{engine.world_size}")
    return records
