"""Parallel degrees that options of training, the model or the number of ranks exclude."""

from typing import Any

import pytest

from components.train.config import TrainConfig
from tests.messages import says


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"engine": "deepspeed"}, ["parallel.context=2", "engine=deepspeed", "train.engine=fsdp"]),
        ({"packing": False}, ["parallel.context=2", "packing=False"]),
        ({"context": 0}, ["context=0", 1]),
        ({"context": 1, "tensor": 2, "engine": "deepspeed"}, ["parallel.tensor=2", "train.engine=fsdp"]),
        ({"context": 1, "tensor": 0}, ["tensor=0", 1]),
    ],
)
def test_models_without_context_parallelism_are_refused_by_name(settings: dict[str, Any], facts: list[object]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        TrainConfig(**({"engine": "fsdp", "zero_stage": 2, "context": 2} | settings))


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"engine": "deepspeed"}, ["parallel.expert=2", "engine=deepspeed", "train.engine=fsdp"]),
        ({"expert": 0}, ["expert=0", 1]),
        ({"lora_rank": 2}, ["parallel.expert=2", "lora_rank=2"]),
        ({"tensor": 2}, ["parallel.tensor=2", "parallel.expert=2"]),
    ],
)
def test_settings_without_expert_parallelism_are_refused_by_name(settings: dict[str, Any], facts: list[object]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        TrainConfig(**({"engine": "fsdp", "zero_stage": 2, "expert": 2} | settings))
