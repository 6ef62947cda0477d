"""recipes/grpo/single_file.py equals the recipe: the same rewards, losses and KL in every step, bit by bit."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from local_runs import kept_environment, run_here, unchanged

from recipes.grpo import main as recipe
from recipes.grpo import single_file
from recipes.grpo.config import GRPOConfig
from recipes.grpo.single_file import Settings, train
from tests.architecture import imports_of

FILE = Path(single_file.__file__)
ROOT = FILE.parents[2]
STEPS = 4
REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    # The share of letters that come later than the one before: a model that has hardly learnt earns some of it.
    responses = [query[len(prompt):len(prompt) + 5] for query, prompt in zip(queries, prompts)]
    return {"rewards": [sum(a < b for a, b in zip(response, response[1:])) / 4 for response in responses]}
"""
SIZES = {"steps": STEPS, "prompts_per_step": 8, "samples_per_prompt": 4, "learning_rate": 1e-3, "seed": 7}
CASES = {
    "two_mini_batches": {"mini_batch_size": 16},
    "two_epochs_with_kl": {"mini_batch_size": 32, "epochs": 2, "kl_coef": 0.1, "temperature": 0.8, "max_tokens": 96},
    "on_policy": {"mini_batch_size": 32},
}


def settings_of(config: GRPOConfig) -> Settings:
    """Return the settings of the single file that correspond to a configuration of the recipe."""
    assert config.data.max_samples is not None
    assert config.reward_source is not None
    assert config.train.max_tokens is not None, "options are resolved"
    return Settings(
        data=config.data.path,
        reward=config.reward_source,
        steps=config.steps(config.data.max_samples),
        prompts_per_step=config.prompts_per_step,
        samples_per_prompt=config.samples_per_prompt,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        mini_batch_size=config.mini_batch_size,
        epochs=config.train.epochs,
        max_tokens=config.train.max_tokens,
        learning_rate=config.train.learning_rate,
        clip_low=config.algorithm.clip_low,
        clip_high=config.algorithm.clip_high,
        kl_coef=config.algorithm.kl_coef,
        seed=config.seed,
    )


def options_of(settings: Settings) -> list[str]:
    """Return the options of the recipe that correspond to these settings."""
    groups = {
        "data": ("path", "max_samples"),
        "reward": ("source",),
        "rollout": ("max_new_tokens", "temperature"),
        "train": ("mini_batch_size", "epochs", "max_tokens", "learning_rate"),
        "algorithm": ("clip_low", "clip_high", "kl_coef"),
    }
    group_of = {name: f"{group}.{name}" for group, names in groups.items() for name in names}
    values = asdict(settings)
    values["path"] = values.pop("data")
    values["source"] = values.pop("reward")
    values["max_samples"] = values.pop("steps") * settings.prompts_per_step
    return [f"{group_of.get(name, name)}={value}" for name, value in values.items()]


@contextmanager
def in_this_process() -> Iterator[None]:
    """Undo the changes that a training engine makes to its process, and check that it makes no others."""
    with unchanged(), kept_environment(), torch.random.fork_rng():
        yield


@pytest.mark.parametrize("case", CASES)
def test_each_step_has_the_same_metrics_as_the_recipe(case: str, policy: Path, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    settings = Settings(reward=str(reward), **SIZES | CASES[case])
    run = run_here("grpo", tmp_path / "run", f"model.path={policy}", *options_of(settings))
    assert run.code == 0, run.err
    with in_this_process():
        steps = list(train(str(policy), settings))

    assert len(steps) == len(run.metrics) == STEPS
    for ours, line in zip(steps, run.metrics, strict=True):
        theirs = {name.removeprefix("actor/"): value for name, value in line.items()}
        theirs["reward"] = line["reward/reward"]
        compared = ours.keys() - {"seconds"}
        assert {"reward", "loss", "approx_kl", "entropy", "grad_norm", "clip_frac"} <= compared
        assert ("kl_loss" in compared) == (settings.kl_coef > 0)
        assert {name: ours[name] for name in compared} == {name: theirs[name] for name in compared}
    # The comparison is meaningful: rewards differ between responses, and the policy has changed.
    assert all(step["grad_norm"] > 0 for step in steps)
    assert len({step["reward"] for step in steps}) > 1
    is_on_policy = settings.mini_batch_size == 32 and settings.epochs == 1
    assert all((step["approx_kl"] == 0) == is_on_policy for step in steps)


def test_the_defaults_of_the_script_are_those_of_the_demonstration() -> None:
    tiny = recipe.read_config(["--config", str(FILE.with_name("tiny.yaml"))])
    assert settings_of(tiny) == Settings()


def test_the_command_line_prints_a_line_per_step(
    policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--steps", "2", "--prompts_per_step", "2", "--samples_per_prompt", "2", "--mini_batch_size", "4"]
    monkeypatch.setattr(sys, "argv", ["single_file.py", str(policy), *sizes, "--learning_rate", "1e-3"])
    with in_this_process():
        single_file.main()
    lines = [dict(pair.split("=") for pair in line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == ["1", "2"]
    assert all(list(line) == ["step", "reward", "loss", "approx_kl", "entropy", "seconds"] for line in lines)


def test_the_script_is_short_and_imports_only_components() -> None:
    assert len(FILE.read_text().splitlines()) <= 150
    imported = {module.top for module in imports_of(FILE, ROOT)}
    assert imported <= {"components", "torch", "numpy"} | sys.stdlib_module_names
    assert "components" in imported
