"""Work of a rank in the tests of empty models: the same training from a fully loaded model and from an empty one."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from components.models.disk import weight_files
from components.models.disk.blocks import local_part
from components.models.loading import load_policy
from components.models.value_model import load_value_model
from components.train.engine import TrainEngine
from components.train.opening import open_engine
from tests.components.helpers.train_cases import config, minibatches, nll, squared_error, weights

CASES: dict[str, dict[str, Any]] = {
    "fsdp-2": {"engine": "fsdp", "zero_stage": 2},
    "fsdp-3-bf16": {"engine": "fsdp", "zero_stage": 3, "precision": "bf16"},
    "fsdp-3-offload": {"engine": "fsdp", "zero_stage": 3, "adam_offload": True},
    "fsdp-3-lora": {"engine": "fsdp", "zero_stage": 3, "lora_rank": 2},
    "fsdp-3-value": {"engine": "fsdp", "zero_stage": 3},
    "zero-0": {"zero_stage": 0},
    "zero-1-bf16": {"zero_stage": 1, "precision": "bf16"},
    "zero-2-lora": {"zero_stage": 2, "precision": "bf16", "lora_rank": 2},
    "zero-3": {"zero_stage": 3},
    "zero-3-bf16": {"zero_stage": 3, "precision": "bf16"},
    "zero-3-lora": {"zero_stage": 3, "precision": "bf16", "lora_rank": 2},
    "zero-3-value": {"zero_stage": 3, "adam_offload": True},
    "fsdp-3-packing": {"engine": "fsdp", "zero_stage": 3, "packing": True},
}


def trained(case: str, folder: str, empty: bool) -> dict[str, Any]:
    torch.manual_seed(7)
    chosen = config(max_tokens=40, **CASES[case])
    load, loss = (load_value_model, squared_error) if "value" in case else (load_policy, nll)
    engine = open_engine(load(folder, empty=empty, packing=chosen.packing), chosen)
    record: dict[str, Any] = {"first": weights(engine), "bytes": held(engine), "random": torch.get_rng_state()}
    record["metrics"] = [engine.train_step(batch, loss) for batch in minibatches()]
    return record | {"last": weights(engine)}


def held(engine: TrainEngine) -> int:
    """Bytes of this rank's parameters."""
    parts: list[Tensor] = [local_part(getattr(p, "ds_tensor", p)) for p in engine.model.parameters()]
    return sum(part.untyped_storage().nbytes() for part in parts)


def bytes_read() -> int:
    """Return the number of bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


def reading(folder: str) -> tuple[int, int]:
    """Return the bytes that a rank reads from a model's files for its shard, and the bytes of that shard."""
    model = load_policy(folder, empty=True)
    before = bytes_read()
    engine = open_engine(model, config(**CASES["fsdp-2"]))
    return bytes_read() - before, held(engine)


def both_ways(folder: str) -> dict[str, dict[bool, Any]]:
    """Return the results by case, for models loaded completely (False) and created empty (True)."""
    # A small buffer, so that a matrix is read in several parts.
    weight_files.READ_BYTES = 5000
    record: dict[str, dict[bool, Any]] = {
        case: {empty: trained(case, folder, empty) for empty in (False, True)} for case in CASES
    }
    # Measured last, after all imports.
    record["read"] = {True: reading(folder)}
    return record
