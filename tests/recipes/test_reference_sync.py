"""The reference model follows the policy at intervals, and a resumed run restores it."""

from pathlib import Path

import pytest
import torch
from local_runs import run_locally
from safetensors.torch import load_file
from torch import Tensor

from recipes.grpo.main import read_config
from tests.recipe_copies import write_untrained
from training.options.schema import ConfigError

OPTIONS = """
    data.path=task:sort prompts_per_step=4 samples_per_prompt=4 train.mini_batch_size=16 max_steps=5
    rollout.max_new_tokens=8 algorithm.kl_coef=0.1 algorithm.reference_sync_steps=2 train.learning_rate=1e-2
    checkpoint.every=1 checkpoint.keep=9 evaluation.every=-1 evaluation.max_samples=4
"""
REWARD = "def reward_func(queries, **_):\n    return [sum(map(ord, query)) % 7 / 7 for query in queries]\n"


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Options of a run whose responses have different rewards."""
    (tmp_path / "reward.py").write_text(REWARD)
    return [
        f"model.path={write_untrained(tmp_path / 'model')}",
        f"reward.source={tmp_path}/reward.py",
        *OPTIONS.split(),
    ]


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_reference_is_mixed_with_the_policy_after_every_second_step(options: list[str], tmp_path: Path) -> None:
    runs = run_locally("grpo", tmp_path, {"run": [*options, "algorithm.reference_mixup=0.25"]})
    steps = runs["run"].run_dir / "checkpoints"
    first, second = weights(tmp_path / "model"), weights(steps / "step_2" / "state" / "reference")
    policy = weights(steps / "step_2" / "hf")
    moved = 0.0
    for name, tensor in second.items():
        torch.testing.assert_close(tensor, 0.75 * first[name] + 0.25 * policy[name], rtol=0, atol=1e-6)
        moved = max(moved, float((tensor - first[name]).abs().max()))
    assert moved > 1e-3
    assert not (steps / "step_1" / "state" / "reference").exists()
    third = weights(steps / "step_3" / "state" / "reference")
    assert all(torch.equal(tensor, second[name]) for name, tensor in third.items())
    fourth, policy = weights(steps / "step_4" / "state" / "reference"), weights(steps / "step_4" / "hf")
    for name, tensor in fourth.items():
        torch.testing.assert_close(tensor, 0.75 * second[name] + 0.25 * policy[name], rtol=0, atol=1e-6)


@pytest.mark.full
def test_a_resumed_run_loads_the_reference_of_its_checkpoint(options: list[str], tmp_path: Path) -> None:
    early = [*options, "max_steps=3"]
    run_locally("grpo", tmp_path, {"run": early})
    runs = run_locally("grpo", tmp_path, {"run": options, "undisturbed": options})
    assert runs["run"].summary["resumed_from"] == 3
    assert runs["run"].learnt() == runs["undisturbed"].learnt()
    actual, expected = runs["run"].weights(), runs["undisturbed"].weights()
    assert [name for name, tensor in actual.items() if not torch.equal(tensor, expected[name])] == []


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("algorithm.reference_sync_steps=0", "set it to at least 1"),
        ("algorithm.reference_mixup=0", "set it above 0"),
        ("train.lora_rank=4", "without its adapters"),
    ],
)
def test_invalid_reference_sync_options_are_rejected(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config([*OPTIONS.split(), "model.path=none", option])
