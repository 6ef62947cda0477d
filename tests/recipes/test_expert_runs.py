"""grpo with expert parallelism (parallel.expert) on two ranks gives the results of one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from local_runs import run_locally
from recipe_runs import Run
from safetensors.torch import load_file
from test_role_group_runs import TWO_STEPS, options
from tiny_models import byte_tokenizer, shape
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


@pytest.mark.nightly
def test_expert_parallel_training_on_two_ranks_matches_one_rank(ray_address: str, tmp_path: Path) -> None:
    policy, tokenizer = tmp_path / "policy", byte_tokenizer()
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**(shape(tokenizer) | experts))).save_pretrained(policy)
    tokenizer.save_pretrained(policy)
    arguments = [*options(policy, tmp_path), *TWO_STEPS, "train.engine=fsdp", "train.zero_stage=3"]
    alone = run_locally("grpo", tmp_path, {"alone": arguments})["alone"]
    shared = [*arguments, "placement.actor_ranks=2", "parallel.expert=2"]
    run = Run("grpo", ray_address, tmp_path / "run", *shared).wait()
    assert run.code == 0, run.err
    assert run.summary["steps"] == 2
    for actual, expected in zip(run.metrics, alone.metrics, strict=True):
        for name in sorted({"actor/loss", "actor/grad_norm", "actor/entropy"} & expected.keys()):
            assert actual[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    exported = [load_file(one.run_dir / "checkpoints/step_2/hf/model.safetensors") for one in (run, alone)]
    assert exported[0].keys() == exported[1].keys()
    assert run.left_behind() == []
