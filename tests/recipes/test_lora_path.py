"""Training that starts from adapters in a folder: generation, training, resume and export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from local_runs import LocalRun, run_here
from tiny_models import write_policy
from transformers import AutoModelForCausalLM

from components.batch import Batch
from components.batch.reading import load_batch
from recipes.grpo.config import GRPOConfig
from recipes.verl_ppo.adapter import plain_arguments
from recipes.verl_ppo.config import VerlPPOConfig
from tests.messages import says
from training.options.config import load_config
from training.options.schema import ConfigError

pytestmark = pytest.mark.full

SMALL = """
    data.path=task:sort reward.source=sort prompts_per_step=4 samples_per_prompt=4 rollout.max_new_tokens=6 max_steps=2
    rollout.engine=hf algorithm.kl_coef=0.1 train.precision=fp32 checkpoint.every=1
"""


def write_adapters(folder: Path, model: Path, **settings: Any) -> Path:
    """Write adapters with weights far from 0, created by peft for a model."""
    from peft import LoraConfig, get_peft_model

    adapter_settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]} | settings
    adapted: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), LoraConfig(task_type="CAUSAL_LM", **adapter_settings)
    )
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_policy(folder / "policy")
    write_adapters(folder / "adapters", folder / "policy")
    return folder


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    return run_here("grpo", tmp_path_factory.mktemp("run") / "it", *options(model))


def options(model: Path, *more: str) -> list[str]:
    arguments = [f"model.path={model}/policy", f"train.lora_path={model}/adapters", "train.learning_rate=1e-2"]
    return [*SMALL.split(), *arguments, *more]


def logprobs(adapted: Any, batch: Batch, row: int) -> torch.Tensor:
    tokens = batch.row(row, "tokens")
    with torch.no_grad():
        logits = adapted(tokens[None]).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0][batch.row(row, "action_mask")[1:]]


def test_the_first_responses_come_from_the_model_with_the_loaded_adapters(model: Path, run: LocalRun) -> None:
    from peft import PeftModel

    assert run.code == 0, run.err
    batch = load_batch(run.run_dir / "rollouts" / "step_000001.parquet")
    base: Any = AutoModelForCausalLM.from_pretrained(model / "policy")
    plain = [logprobs(base, batch, row) for row in range(len(batch))]
    adapted: Any = PeftModel.from_pretrained(base, str(model / "adapters"))
    acts = batch["action_mask"]
    expected = torch.cat([logprobs(adapted, batch, row) for row in range(len(batch))])
    torch.testing.assert_close(batch["rollout_logprob"][acts], expected, rtol=0, atol=1e-4)
    # The reference is the model without adapters.
    torch.testing.assert_close(batch["reference_logprob"][acts], torch.cat(plain), rtol=0, atol=1e-4)
    assert (expected - torch.cat(plain)).abs().mean() > 0.01
    assert run.metrics[0]["actor/first_ratio_mean"] == pytest.approx(1, abs=1e-5)
    # The export can be loaded like the input, and the merged weights compute the same.
    after = run.run_dir / "checkpoints" / "step_2"
    (written,) = after.rglob("adapter_config.json")
    assert json.loads(written.read_text())["r"] == 4
    again: Any = AutoModelForCausalLM.from_pretrained(model / "policy")
    trained: Any = PeftModel.from_pretrained(again, str(written.parent))
    whole: Any = AutoModelForCausalLM.from_pretrained(after / "hf")
    torch.testing.assert_close(logprobs(trained, batch, 0), logprobs(whole, batch, 0), rtol=0, atol=1e-4)
    assert (logprobs(trained, batch, 0) - logprobs(adapted, batch, 0)).abs().max() > 1e-3


def test_a_resumed_run_continues_with_the_trained_adapters(model: Path, run: LocalRun, tmp_path: Path) -> None:
    rest = run_here("grpo", tmp_path / "rest", *options(model, f"resume={run.run_dir}/checkpoints/step_1"))
    assert rest.code == 0, rest.err
    weights = [folder / "checkpoints/step_2/hf/model.safetensors" for folder in (run.run_dir, rest.run_dir)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize(
    ("settings", "options", "facts"),
    [
        ({}, ["train.lora_path=HERE/none"], ["lora_path=", "adapter_config.json"]),
        ({"use_dora": True}, [], ["use_dora=True", "merge"]),
        ({"bias": "all"}, [], ["bias=all", "merge"]),
        ({"rank_pattern": {"q_proj": 2}}, [], ["rank_pattern"]),
        ({}, ["train.lora_rank=8"], ["lora_rank=8", "have 4"]),
    ],
)
def test_unsupported_adapters_are_rejected(
    settings: dict[str, Any], options: list[str], facts: list[Any], model: Path, tmp_path: Path
) -> None:
    write_adapters(tmp_path / "adapters", model / "policy", **settings)
    words = [f"train.lora_path={tmp_path}/adapters", *(word.replace("HERE", str(tmp_path)) for word in options)]
    with pytest.raises(ConfigError, match=says(*facts)):
        load_config(GRPOConfig, [*SMALL.split(), f"model.path={model}/policy", *words])


def test_the_key_of_verl_uses_the_settings_stored_with_the_adapters(model: Path) -> None:
    part = "actor_rollout_ref.model"
    config = load_config(
        VerlPPOConfig,
        plain_arguments(
            f"""{part}.path={model}/policy data.train_files=task:sort {part}.lora_rank=64 {part}.lora_alpha=32
            actor_rollout_ref.actor.use_dynamic_bsz=true {part}.target_modules=all-linear
            {part}.lora_adapter_path={model}/adapters""".split()
        ),
    )
    train = config.train
    assert (train.lora_rank, train.lora_alpha, train.lora_target_modules) == (4, 8, "down_proj,q_proj")
    assert train.lora_path == f"{model}/adapters"
    assert config.is_own_reference
    assert config.critic.lora_rank == 0
