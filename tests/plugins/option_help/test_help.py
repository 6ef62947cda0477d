"""`--help` of recipes: an overview of two screens, and descriptions of groups, plug-ins and options."""

import re
from importlib import import_module

import pytest

from plugins.option_help.help import COLUMNS, LINES, help_text
from recipes.grpo.config import GRPOConfig
from recipes.grpo.main import main
from tests.messages import says
from training.options.described import options_of

RECIPES = ("grpo", "reinforce_pp", "multi_turn", "sft", "dpo", "reward_model", "openrlhf_ppo", "verl_ppo")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_overview_fits_two_screens_and_names_every_group(recipe: str) -> None:
    schema = import_module(f"recipes.{recipe}.main").COMMAND.schema
    text = help_text(schema)
    lines = text.splitlines()
    assert len(lines) <= LINES == 100
    assert max(map(len, lines)) <= COLUMNS == 120
    groups = {option.name.partition(".")[0] for option in options_of(schema) if "." in option.name}
    assert [name for name in groups if not any(line.split()[:1] == [name] for line in lines)] == []


def test_the_overview_lists_the_recipes_own_options_and_those_of_plugins() -> None:
    lines = help_text(GRPOConfig).splitlines()
    assert any(line.startswith("  algorithm.std_norm=true ") for line in lines)
    assert not any(line.startswith("  rollout.top_p") for line in lines)
    assert any(line.split()[:2] == ["vllm", "7"] for line in lines)


def test_help_of_a_group_lists_plugin_options_separately() -> None:
    lines = help_text(GRPOConfig, "rollout").splitlines()
    assert {line.partition(".")[0] for line in lines if line.startswith("--")} == {"--rollout"}
    title = lines.index("Options of the plug-in vllm:")
    assert "--rollout.temperature  (float, default 1.0)" in lines[:title]
    assert "--rollout.tensor_parallel  (int, default 1)" in lines[title:]


def test_help_can_show_a_plugin_an_option_or_everything() -> None:
    assert "--rollout.gpu_memory" in help_text(GRPOConfig, "vllm")
    assert help_text(GRPOConfig, "--rollout.top_k").count("\n--") == 1
    lines = help_text(GRPOConfig, "all").splitlines()
    assert [o.name for o in options_of(GRPOConfig) if not any(x.startswith(f"--{o.name} ") for x in lines)] == []


def test_an_unknown_help_topic_gives_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "rolout"]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert re.search(says("grpo", "rolout", "'rollout'"), error)


def test_the_topic_may_follow_other_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model.path=x", "--help", "checkpoint"]) == 0
    assert "--checkpoint.keep" in capsys.readouterr().out


@pytest.mark.usefixtures("their_plugin")
def test_a_group_that_a_plugin_adds_is_shown() -> None:
    assert "with model.attn_implementation=theirs: Options of their kernels" in help_text(GRPOConfig)
    for topic in ("theirs", "all"):
        assert "--theirs.speed  (int, default 3)" in help_text(GRPOConfig, topic)
