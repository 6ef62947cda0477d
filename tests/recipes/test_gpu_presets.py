"""gpu.yaml of the recipes that sample: the defaults of a user's run on GPUs, tested by plans without GPUs."""

import json
import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import ROOT

from tests.messages import says

RECIPES = ["grpo", "reinforce_pp", "multi_turn", "openrlhf_ppo", "verl_ppo"]
QWEN: dict[str, Any] = {"model_type": "qwen2", "num_hidden_layers": 28, "max_position_embeddings": 32768}
MODELS = {
    # Choices for Qwen2.5-1.5B on one GPU of 141 GB, and for Qwen2.5-7B on eight GPUs of 80 GB.
    "1x1x141GB": {
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "8x1x80GB": {
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
DATA = ["data.path=task:sort", "data.max_prompt_tokens=1024", "rollout.max_new_tokens=1024"]


def required_options(recipe: str, folder: Path, machines: str) -> list[str]:
    """Return options with a model of which only the config exists."""
    (folder / "config.json").write_text(json.dumps(QWEN | MODELS[machines]))
    agent = ["agent.func_path=env:guess", "data.path=task:guess"] if recipe == "multi_turn" else []
    # The length of an episode is that of the model's positions, unless it is set.
    agent += ["agent.max_tokens=2048"] if agent else []
    return [f"model.path={folder}", *DATA, *agent, "dry_run=true", f"assume_devices={machines}"]


def planned(recipe: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """Return the plan, and the part that is printed."""
    code = import_module(f"recipes.{recipe}.main").main(arguments)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return json.loads(shown.out), shown.err


@pytest.mark.parametrize("machines", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_on_gpus_a_user_model_uses_packing_and_chosen_options_and_fits(
    recipe: str, machines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, shown = planned(recipe, required_options(recipe, tmp_path, machines), capsys)
    config = plan["config"]
    train, placement = config["train"], config["placement"]
    assert (train["precision"], train["packing"]) == ("bf16", None)  # packing, if the model supports it
    assert config["rollout"]["engine"] == "vllm"
    assert placement["colocate"]
    chosen = dict(text.partition(":")[0].split("=") for text in plan["chosen"])
    assert {"train.max_tokens", "rollout.gpu_memory", "placement.engines_sleep"} <= chosen.keys()
    for name, value in chosen.items():
        group, option = name.split(".")
        assert json.loads(value) == config[group][option]
    assert sum(bool(re.search(says("gpu.yaml", "train.precision=bf16"), line)) for line in shown.splitlines()) == 1
    devices = [place for place in plan["places"] if place["there"] is not None]
    assert devices
    assert [place for place in devices if place["most"] > place["there"]] == []


def test_user_options_override_the_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = required_options("grpo", tmp_path, "8x1x80GB")
    options = ["train.packing=false", "placement.engines_sleep=true", "train.gradient_checkpointing=true"]
    plan, _ = planned("grpo", [*arguments, *options], capsys)
    assert (plan["config"]["train"]["packing"], plan["config"]["train"]["gradient_checkpointing"]) == (False, True)
    assert plan["config"]["placement"]["engines_sleep"] is True
    assert "engines_sleep" not in str(plan["chosen"])
    # A file of the user replaces the preset.
    path = tmp_path / "own.yaml"
    path.write_text("train: {zero_stage: 2}\n")
    plan, shown = planned("grpo", [*arguments, "--config", str(path)], capsys)
    assert (plan["config"]["train"]["engine"], plan["config"]["train"]["packing"]) == ("deepspeed", None)
    assert "gpu.yaml" not in shown
    # A file of the recipe next to the preset, such as a variant of the algorithm, does not replace it.
    plan, shown = planned("grpo", [*arguments, "--config", "recipes/grpo/dr_grpo.yaml"], capsys)
    assert (plan["config"]["train"]["engine"], plan["config"]["algorithm"]["std_norm"]) == ("fsdp", False)
    assert "gpu.yaml" in shown
    # Without GPUs, and in the demonstration, the preset is not used.
    for others in (["assume_devices=0", *arguments[:-1]], ["dry_run=true", "assume_devices=8"]):
        _, shown = planned("grpo", others, capsys)
        assert "gpu.yaml" not in shown


def test_an_openrlhf_command_is_not_changed_by_the_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = required_options("openrlhf_ppo", tmp_path, "8x1x80GB")
    flags = ["--colocate_all_models", "--zero_stage", "3", "--train_batch_size", "128", "--deepspeed_enable_sleep"]
    plan, shown = planned("openrlhf_ppo", [*arguments, *flags], capsys)
    assert (plan["config"]["train"]["engine"], plan["config"]["train"]["packing"]) == ("deepspeed", None)
    assert "gpu.yaml" not in shown


@pytest.mark.parametrize(("has_gpu", "has_preset", "fails"), [(1, 1, 0), (1, 1, 1), (1, 0, 0), (0, 1, 0)])
def test_run_sh_installs_vllm_if_there_are_gpus_and_a_preset(
    has_gpu: int, has_preset: int, fails: int, tmp_path: Path
) -> None:
    scripts = {
        "scripts/setup.sh": f'echo "$*" >>calls\n[[ "$*" != *vllm* || {fails} == 0 ]]',
        "recipes/mine/main.py": "",
        ".venv/bin/python": "echo ran >>calls",
        **({"bin/nvidia-smi": "exit 0"} if has_gpu else {}),
        **({"recipes/mine/gpu.yaml": "train: {}"} if has_preset else {}),
    }
    for name, body in scripts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n" if not name.endswith(".py") else body)
        (tmp_path / name).chmod(0o755)
    shutil.copy(ROOT / "scripts/run_recipe.sh", tmp_path / "scripts")
    done = subprocess.run(
        ["bash", "scripts/run_recipe.sh", "recipes/mine"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    first = "--quiet recipes vllm" if has_gpu and has_preset else "--quiet recipes"
    # The folder is checked by Python, and then run.
    expected = [first, *(["--quiet recipes"] if fails else []), "ran", "ran"]
    assert (tmp_path / "calls").read_text().splitlines() == expected
    assert bool(re.search(says("vLLM", "installed"), done.stderr)) == bool(fails)


@pytest.mark.parametrize("recipe", ["openrlhf_ppo", "verl_ppo"])
def test_a_preset_that_conflicts_with_user_options_is_skipped_with_a_note(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ahead = ["asynchronous.enabled=true", "placement.colocate=false"]
    plan, shown = planned(recipe, [*required_options(recipe, tmp_path, "8x1x80GB"), *ahead], capsys)
    assert plan["config"]["placement"]["learners_sleep"] is False
    assert re.search(says("gpu.yaml", "placement.learners_sleep", "asynchronous.enabled"), shown)
    both = [*required_options(recipe, tmp_path, "8x1x80GB"), *ahead, "placement.learners_sleep=true"]
    assert import_module(f"recipes.{recipe}.main").main(both) == 2
