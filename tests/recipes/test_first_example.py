"""Before training, every recipe shows the first example, the part that is trained on, and the used columns."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from local_runs import run_here
from tiny_models import write_policy

from tests.messages import says

pytestmark = pytest.mark.full

USER = {"role": "user", "content": "2+2?"}
ASSISTANT = {"role": "assistant", "content": "It is"}
RENDERED = "'<user>2+2?\\n<assistant>"
"""The prompt as rendered by the template and escaped by Python."""
ROLLOUTS = ("grpo", "reinforce_pp", "multi_turn", "openrlhf_ppo", "verl_ppo")
LINES = {
    "sft": [("first demonstration", RENDERED, "[[learnt]]", "4", "[[/learnt]]")],
    "dpo": [
        ("first pair, chosen", RENDERED, "[[learnt]]'4", "[[/learnt]]"),
        ("first pair, rejected", RENDERED, "[[learnt]]'5", "[[/learnt]]"),
    ],
    "reward_model": [("first pair, chosen", f"{RENDERED}4"), ("first pair, rejected", f"{RENDERED}5")],
    **{key: [("first prompt", f"{RENDERED}It is'"), ("1 of 1 prompts", "continues")] for key in ROLLOUTS},
}
NOT_USED = {"sft": "not used: note", "dpo": "not used: note", "reward_model": "not used: note"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("model"))


def options(recipe: str, model: Path, folder: Path, **more: Any) -> list[str]:
    """Run a recipe with one row of its kind."""
    row: dict[str, Any] = {"prompt": [USER], "note": "x"}
    if recipe == "sft":
        row["response"] = [{"role": "assistant", "content": "4"}]
    elif recipe in ("dpo", "reward_model"):
        row |= {"chosen": "4", "rejected": "5"}
    else:
        row = {"prompt": [USER, ASSISTANT], "data_source": "sort", "reward_model": {"ground_truth": "4"}}
    (folder / "rows.jsonl").write_text(json.dumps(row | more) + "\n")
    arguments = [f"model.path={model}", f"data.path={folder / 'rows.jsonl'}"]
    if recipe in ROLLOUTS and recipe != "verl_ppo":
        rewards = "agent.func_path=env:guess" if recipe == "multi_turn" else "reward.source=exact_match"
        arguments += [rewards, "data.prompt_key=prompt", "prompts_per_step=1"]
    if recipe == "multi_turn":
        arguments += ["data.label_key=reward_model.ground_truth"]
    if recipe in ("openrlhf_ppo", "verl_ppo"):
        arguments += ["train.mini_batch_size=1"]
    if recipe == "verl_ppo":
        arguments += ["prompts_per_step=1", "data.epochs=2"]
    if recipe not in ROLLOUTS:
        arguments += ["evaluation.held_out=0"]
    return arguments


@pytest.mark.parametrize("recipe", LINES)
def test_a_dry_run_shows_the_first_example_and_the_columns(
    recipe: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = import_module(f"recipes.{recipe}.main").main
    code = main(["--dry_run", *options(recipe, model, tmp_path)])
    err = capsys.readouterr().err
    assert code == 0, err
    lines = err.splitlines()
    (columns,) = [line for line in lines if "columns used:" in line]
    assert re.search(says("prompt", NOT_USED.get(recipe, "only for rewards and agents")), columns)
    for facts in LINES[recipe]:
        assert [line for line in lines if re.search(says(*facts), line)], (facts, err)


@pytest.mark.parametrize("recipe", LINES)
def test_an_unread_column_is_refused_before_the_start(
    recipe: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    main = import_module(f"recipes.{recipe}.main").main
    run = tmp_path / "run"
    # The template of the model has no place for tools.
    code = main([f"run_dir={run}", "backend=local", *options(recipe, model, tmp_path, tools=tools)])
    assert code == 2
    assert re.search(says("tools", "data.ignored_columns=tools"), capsys.readouterr().err)
    assert not run.exists()


def test_a_run_shows_the_first_example_and_the_columns(model: Path, tmp_path: Path) -> None:
    arguments = [*options("sft", model, tmp_path), "train.batch_size=1", "evaluation.held_out=0"]
    run = run_here("sft", tmp_path / "run", *arguments)
    assert run.code == 0, run.err
    shown = run.out + run.err
    assert re.search(says("columns used: prompt, response; not used: note", *LINES["sft"][0]), shown)
