"""docs/algorithms.md names all functions and choices, and all names on it exist."""

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from recipes.distill.config import DistillConfig
from recipes.dpo.config import DPOConfig
from recipes.grpo.config import GRPOConfig
from recipes.openrlhf_ppo import config
from recipes.openrlhf_ppo.config import PPOConfig
from recipes.reward_model.config import RewardModelConfig
from recipes.verl_ppo import config as verl
from recipes.verl_ppo.adapter import ESTIMATORS, VERL
from recipes.verl_ppo.config import VerlPPOConfig
from training.options.described import options_of
from training.options.ppo_options import Aggregation, PolicyLoss

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
LOSSES = ("policy_losses", "ratio_losses", "covariance_losses", "preference_losses", "supervised", "value_losses")
ADVANTAGES = ("advantages", "group_advantages", "returns")
SPLIT = ("distillation", "group_filter", "token_rewards")
MODULES = (*ADVANTAGES, "aggregation", "correction", "exploration", "kl", "resampling", "rewards", *SPLIT, *LOSSES)
IN_CODE = set(re.findall(r"`([^`\s(]+)", PAGE))


def public(module: str) -> list[str]:
    """Return the public functions of a module of components/rl."""
    functions = inspect.getmembers(import_module(f"components.rl.{module}"), inspect.isfunction)
    return [name for name, f in functions if f.__module__ == f"components.rl.{module}" and not name.startswith("_")]


@pytest.mark.parametrize("module", MODULES)
def test_every_function_is_on_the_page(module: str) -> None:
    assert set(public(module)) <= IN_CODE


@pytest.mark.parametrize("schema", [config, verl])
def test_every_choice_of_the_recipe_is_on_the_page(schema: ModuleType) -> None:
    choices = [*get_args(schema.Estimator), *get_args(PolicyLoss), *get_args(Aggregation)]
    assert set(choices) <= IN_CODE


def test_verls_names_of_estimators_of_the_kl_are_on_the_page() -> None:
    assert {name + end for name in (*ESTIMATORS, "k1", "k2", "k3", "abs") for end in ("", "+")} <= IN_CODE


def test_every_option_named_on_the_page_exists() -> None:
    keys = [*VERL.options, *VERL.computed, *(option.name for option in options_of(VerlPPOConfig))]
    verls = [key.removeprefix("actor_rollout_ref.") for key in keys]
    verls += [f"algorithm.kl_ctrl.{name}" for name in ("kl_coef", "type", "target_kl", "horizon")]
    verls += ["algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold"]
    verls += ["actor.clip_ratio", "actor.clip_ratio_low", "actor.clip_ratio_high", "reward_model.reward_manager"]
    verls += ["reward_model.enable"]
    dotted = {name for name in IN_CODE if re.fullmatch("(actor|critic|algorithm|reward_model)([.][a-z_]+)+", name)}
    schemas = (PPOConfig, RewardModelConfig, DPOConfig, DistillConfig, GRPOConfig)
    options = {option.name for schema in schemas for option in options_of(schema)} | {"actor_rollout_ref", "low_high"}
    assert dotted - {"algorithm.py", "algorithm.rollout_correction"} - set(verls) - options == set()
    options |= {name.rpartition(".")[2] for name in verls if name.startswith("algorithm.rollout_correction.")}
    named = {name for name in IN_CODE if re.fullmatch(r"[a-z]+(_[a-z]+)+", name)}
    functions = {name for module in (*MODULES, "masked", "mismatch") for name in public(module)}
    kinds = (config.Estimator, verl.Estimator, PolicyLoss)
    choices = {choice for kind in kinds for choice in get_args(kind)} | set(ESTIMATORS)
    choices |= {value for target in VERL.options.values() for value in target.values}
    elsewhere = {"token_logprobs", "chi_square_token", "chi_square_sequence", "effective_sample_size"}
    metrics = elsewhere | {"mismatch_k3", "outside_share"}
    assert named - options - functions - choices - metrics == set()


def test_the_example_runs() -> None:
    script = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert script is not None
    run = subprocess.run(
        [sys.executable, "-c", script[1]], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "'ratio_mean': tensor(1.)" in run.stdout
