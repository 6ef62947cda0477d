"""gpu.yaml of the recipes that sample: what a run of the user's own starts from on GPUs. Planned, as there are none here."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.messages import says

RECIPES = ["grpo", "reinforce_pp", "multi_turn", "openrlhf_ppo", "verl_ppo"]
QWEN: dict[str, Any] = {"model_type": "qwen2", "num_hidden_layers": 28, "max_position_embeddings": 32768}
MODELS = {
    # Of Qwen2.5-1.5B on one GPU of 141 GB, and of Qwen2.5-7B on eight of 80 GB.
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


def given(recipe: str, folder: Path, machines: str) -> list[str]:
    """Options with a model of which there is only the shape."""
    (folder / "config.json").write_text(json.dumps(QWEN | MODELS[machines]))
    agent = ["agent.func_path=env:guess", "data.path=task:guess"] if recipe == "multi_turn" else []
    # An episode is as long as the model has positions, unless a user says otherwise.
    agent += ["agent.max_tokens=2048"] if agent else []
    return [f"model.path={folder}", *DATA, *agent, "dry_run=true", f"assume_devices={machines}"]


def planned(recipe: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """The plan, and what a person is shown of it."""
    code = import_module(f"recipes.{recipe}.main").main(arguments)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return json.loads(shown.out), shown.err


@pytest.mark.parametrize("machines", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_on_gpus_a_model_of_ones_own_is_packed_recomputed_and_fits(
    recipe: str, machines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, shown = planned(recipe, given(recipe, tmp_path, machines), capsys)
    config = plan["config"]
    train, placement = config["train"], config["placement"]
    assert (train["precision"], train["zero_stage"]) == ("bf16", 3)
    assert train["packing"] and train["gradient_checkpointing"]
    assert config["rollout"]["engine"] == "vllm"
    assert placement["colocate"] and placement["engines_sleep"]
    assert sum(bool(re.search(says("gpu.yaml", "train.precision=bf16"), line)) for line in shown.splitlines()) == 1
    devices = [place for place in plan["places"] if place["there"] is not None]
    assert devices
    assert [place for place in devices if place["least"] > place["there"]] == []


def test_what_a_user_says_comes_before_the_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = given("grpo", tmp_path, "8x1x80GB")
    plan, _ = planned("grpo", [*arguments, "train.packing=false", "placement.engines_sleep=false"], capsys)
    assert (plan["config"]["train"]["packing"], plan["config"]["train"]["gradient_checkpointing"]) == (False, True)
    assert plan["config"]["placement"]["engines_sleep"] is False
    # With a file of their own they have said it all.
    own = tmp_path / "own.yaml"
    own.write_text("train: {zero_stage: 2}\n")
    plan, shown = planned("grpo", [*arguments, "--config", str(own)], capsys)
    assert (plan["config"]["train"]["engine"], plan["config"]["train"]["packing"]) == ("deepspeed", False)
    assert "gpu.yaml" not in shown
    # So it is without GPUs, and of the demonstration.
    for others in (["assume_devices=0", *arguments[:-1]], ["dry_run=true", "assume_devices=8"]):
        _, shown = planned("grpo", others, capsys)
        assert "gpu.yaml" not in shown


def test_a_command_of_openrlhfs_is_taken_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = given("openrlhf_ppo", tmp_path, "8x1x80GB")
    flags = ["--colocate_all_models", "--zero_stage", "3", "--train_batch_size", "128", "--gradient_checkpointing"]
    plan, shown = planned("openrlhf_ppo", [*arguments, *flags], capsys)
    assert (plan["config"]["train"]["engine"], plan["config"]["train"]["packing"]) == ("deepspeed", False)
    assert "gpu.yaml" not in shown
