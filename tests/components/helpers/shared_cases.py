"""Groups of sequences with common prefixes on two ranks: the work of a rank in test_shared_prompts.py."""

from typing import Any

import torch
from torch import nn

from components.batch import Batch
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.models.packing.layout import END_TO_END, set_layout
from components.models.state_values import token_values
from components.models.value_model import load_value_model
from components.rl.aggregation import LossOutput, Totals
from components.train.engine import TrainEngine
from components.train.opening import open_engine
from tests.components.helpers import train_cases as cases

CASES: dict[str, dict[str, Any]] = {
    "zero-2": {"zero_stage": 2},
    "fsdp-2": {"engine": "fsdp", "zero_stage": 2},
    "checkpointing-fsdp-3": {"engine": "fsdp", "zero_stage": 3},
    "bf16-fsdp-3": {"engine": "fsdp", "zero_stage": 3, "precision": "bf16"},
    "value-zero-1": {"zero_stage": 1},
}


def groups(seed: int, prompts: int, samples: int, prompt: int = 20) -> Batch:
    """Shuffled prompts, each with responses of 1 to 8 tokens. Only the responses are trained on."""
    generator = torch.Generator().manual_seed(seed)
    rows = list[list[int]]()
    for _ in range(prompts):
        start = torch.randint(2, 20, (prompt,), generator=generator).tolist()
        for _ in range(samples):
            length = int(torch.randint(1, 9, (1,), generator=generator))
            rows.append(start + torch.randint(2, 20, (length,), generator=generator).tolist())
    rows = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
    return Batch.from_rows({"tokens": rows, "loss_mask": [[i >= prompt for i in range(len(row))] for row in rows]})


def nll_and_entropy(model: nn.Module, batch: Batch, totals: Totals) -> LossOutput:
    output = token_logprobs(model, batch, 0.7, with_entropy=True)
    assert output.entropy_N is not None
    both_N = output.logprob_N + 0.1 * output.entropy_N
    return LossOutput(loss=-torch.where(batch["loss_mask"], both_N, 0.0).sum() / totals.tokens, metrics={})


def trained(engine: TrainEngine, of_values: bool) -> dict[str, Any]:
    compute, loss = (token_values, cases.squared_error) if of_values else (cases.logprobs, nll_and_entropy)
    sizes: list[int] = []
    engine.model.get_submodule("backbone" if of_values else "model").register_forward_pre_hook(
        lambda _, __, inputs: sizes.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    whole = groups(1, 6, 4)
    part = whole.split(engine.world_size)[engine.rank]
    record: dict[str, Any] = {"before": engine.forward(part, compute), "forward_tokens": sum(sizes)}
    sizes.clear()
    minibatches = [groups(2, 2, 8), groups(3, 9, 2), groups(4, 1, 2)]
    record["metrics"] = [engine.train_step(minibatch, loss) for minibatch in minibatches]
    record["train_tokens"] = sum(sizes)
    record["after"] = engine.forward(part, compute)
    record["weights"] = cases.weights(engine)
    return record


def shared_and_whole(model_folder: str) -> dict[str, Any]:
    """Return the training record of each case, with prompts computed once and with complete sequences."""
    record: dict[str, Any] = {}
    for case, settings in CASES.items():
        for way in ("shared", "whole"):
            of_values, checkpointing = case.startswith("value"), "checkpointing" in case
            load: Any = load_value_model if of_values else load_policy
            model = load(model_folder, gradient_checkpointing=checkpointing, packing=True)
            if way == "whole":
                set_layout(model.backbone if of_values else model, END_TO_END)
            engine = open_engine(model, cases.config(packing=True, **(settings | {"max_tokens": 100})))
            record[f"{case}-{way}"] = trained(engine, of_values)
    return record
