"""Packed sequences and chunked logits with each engine: the work of a rank in test_packed_model.py.

Each case is trained next to a plain one with padding and complete logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from components.batch import Batch
from components.models import head as head_logprobs
from components.models.causal import token_logprobs
from components.models.head import plain_head
from components.models.loading import load_policy
from components.models.packing.layout import packs
from components.models.value_model import load_value_model
from components.rl.aggregation import LossOutput, Totals
from components.train.opening import open_engine
from tests.components.helpers import train_cases as cases

PLAIN = "plain"
CASES: dict[str, dict[str, Any]] = {
    "zero-1": {"zero_stage": 1},
    "zero-2": {"zero_stage": 2},
    "fsdp-2": {"engine": "fsdp", "zero_stage": 2},
    "checkpointing-zero-3": {"zero_stage": 3},
    "checkpointing-fsdp-3": {"engine": "fsdp", "zero_stage": 3},
    "bf16-2": {"zero_stage": 2, "precision": "bf16"},
    "bf16-fsdp-3": {"engine": "fsdp", "zero_stage": 3, "precision": "bf16"},
    "bf16_autocast-3": {"zero_stage": 3, "precision": "bf16_autocast"},
}
VALUES: dict[str, dict[str, Any]] = {name: CASES[name] for name in ("checkpointing-zero-3", "fsdp-2")}


def nll_and_entropy(model: nn.Module, batch: Batch, totals: Totals) -> LossOutput:
    output = token_logprobs(model, batch, 0.7, with_entropy=True)
    assert output.entropy_N is not None
    both_N = output.logprob_N + 0.1 * output.entropy_N
    return LossOutput(loss=-torch.where(batch["loss_mask"], both_N, 0.0).sum() / totals.tokens, metrics={})


@contextmanager
def small_chunks(rows: int) -> Iterator[None]:
    before = head_logprobs._CHUNK
    head_logprobs._CHUNK = {"cpu": (1, rows)}
    try:
        yield
    finally:
        head_logprobs._CHUNK = before


def packed(model_folder: str) -> dict[str, Any]:
    """Return the training record of each case."""
    record: dict[str, Any] = {}
    for precision in sorted({settings.get("precision", "fp32") for settings in CASES.values()}):
        stage = 1 if precision == "bf16" else 0
        model: Any = load_policy(model_folder)
        model.logprobs_from_states = False
        plain = open_engine(model, cases.config(precision=precision, zero_stage=stage))
        record[f"{PLAIN}-{precision}"] = cases.train(plain, nll_and_entropy)
    for case, settings in CASES.items():
        model = load_policy(model_folder, gradient_checkpointing="checkpointing" in case, packing=True)
        engine = open_engine(model, cases.config(packing=True, **settings))
        assert packs(engine._trained)
        assert plain_head(engine._trained) is not None
        with small_chunks(rows=3):
            record[case] = cases.train(engine, nll_and_entropy)
    plain = open_engine(load_value_model(model_folder), cases.config())
    record[f"{PLAIN}-value"] = cases.train(plain, cases.squared_error)
    for case, settings in VALUES.items():
        engine = open_engine(load_value_model(model_folder, packing=True), cases.config(packing=True, **settings))
        record[f"value-{case}"] = cases.train(engine, cases.squared_error)
    return record
