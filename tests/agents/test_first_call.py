"""The trial call of an agent before a run: faults that are refused, notes, and files that are not tried."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from agents import first_call
from agents.first_call import try_agent
from agents.options import AgentOptions
from tests.chat_models import chat_model
from tests.messages import says
from training.options.data_options import DataOptions
from training.options.model_options import ModelOptions

HEAD = """from agents import AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    async def reset(self, states):
"""
STEP = "\n    async def step(self, states):\n        raise AssertionError\n"
ROWS = [
    {"input": f"p{i}", "label": str(i), "datasource": "d", "extra_info": {"level": i}, "columns": ["input"]}
    for i in range(4)
]


def no_tokenizer() -> Any:
    """A tokenizer that must not be needed: an episode that begins with the prompt already has its tokens."""
    raise AssertionError("the tokenizer is loaded")


def tried(
    folder: Path,
    text: str,
    rows: list[dict[str, Any]] = ROWS,
    load: Callable[[], Any] | None = no_tokenizer,
    **data: Any,
) -> list[str]:
    """Return the notes of a trial of an agent file."""
    (folder / "agent.py").write_text(text)
    parts = {"the data": rows, "the held-out data": []}
    return try_agent(AgentOptions(func_path=f"{folder}/agent.py"), DataOptions(path="rows", **data), parts, load)


def reset(body: str) -> str:
    """Return the text of an agent file whose `reset` has this body."""
    return f"{HEAD}        {body}{STEP}"


def test_reset_gets_the_state_of_an_episode_and_a_plain_prompt_needs_no_tokenizer(tmp_path: Path) -> None:
    text = "assert states == {'observation': 'p0', 'label': '0', 'extra_info': {'level': 0}}; return states"
    assert tried(tmp_path, reset(text)) == []


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        ("return {'observation': states['extra_info']['solution']}", ["KeyError", "solution"]),
        ("raise SystemExit(3)", ["SystemExit"]),
        ("import os; os._exit(3)", ["exit code 3"]),
        ("return states['observation']", ["reset returned", "p0", "observation"]),
        ("return {'observation': open('/no/such/file').read()}", ["FileNotFoundError", "/no/such/file"]),
    ],
)
def test_a_reset_that_fails_for_every_row_raises_an_error(body: str, facts: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says("agent.func_path", "agent.py", "row 0 of the data", *facts)):
        tried(tmp_path, reset(body))


@pytest.mark.parametrize(
    ("failure", "fact"), [("assert 0, 'no label'", "no label"), ("import os; os._exit(3)", "exit code 3")]
)
def test_a_reset_that_fails_for_one_row_gives_a_note(failure: str, fact: str, tmp_path: Path) -> None:
    (note,) = tried(tmp_path, reset(f"if states['label'] == '0':\n            {failure}\n        return states"))
    assert re.search(says("row 0 of the data", fact, "agent.max_failed_share"), note)


def test_a_data_source_whose_rows_all_fail_is_refused_although_another_works(tmp_path: Path) -> None:
    rows = [*ROWS, *({**row, "datasource": "other", "label": "x"} for row in ROWS)]
    with pytest.raises(ValueError, match=says("row 4 of the data", "invalid literal")):
        tried(tmp_path, reset("int(states['label']); return states"), rows)


@pytest.mark.parametrize("body", ["raise ConnectionRefusedError('not here')", "import time; time.sleep(600)"])
def test_a_file_missing_on_this_machine_or_a_slow_reset_gives_a_note(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_call, "LIMIT_S", 0.5)
    (note,) = tried(tmp_path, reset(body))
    assert re.search(says("agent.func_path", "no result"), note)


def test_a_message_with_an_already_rendered_prompt_is_refused(tmp_path: Path) -> None:
    model = ModelOptions(path=str(chat_model(tmp_path / "model")))
    text = reset("return {'observation': [{'role': 'user', 'content': states['observation']}]}")
    assert tried(tmp_path, text, load=model.tokenizer) == []
    with pytest.raises(ValueError, match=says("row 0", "data.apply_chat_template=false")):
        tried(tmp_path, text, load=model.tokenizer, apply_chat_template=True)
    (note,) = tried(tmp_path, text, load=None)
    assert re.search(says("no result", "tokenizer"), note)


@pytest.mark.parametrize(("column", "fails"), [("level", False), ("solution", True)])
def test_the_reward_of_an_agent_of_one_turn_is_called(column: str, fails: bool, tmp_path: Path) -> None:
    text = (
        f"from agents import SingleTurnAgentExecutor\ndef reward(completions, {column}):\n    return [1.0]\n"
        "class AgentExecutor(SingleTurnAgentExecutor):\n"
        "    def __init__(self):\n        super().__init__(reward)\n"
    )
    if not fails:
        assert tried(tmp_path, text) == []
        return
    with pytest.raises(ValueError, match=says("row 0", "solution")):
        tried(tmp_path, text)


def test_an_agent_without_reset_is_not_tried(tmp_path: Path) -> None:
    text = (
        "from agents import AgentExecutorBase\nclass AgentExecutor(AgentExecutorBase):\n"
        "    async def execute(self, task, policy):\n        raise AssertionError\n"
    )
    (note,) = tried(tmp_path, text)
    assert "not tried" in note
    (note,) = tried(tmp_path, text, apply_chat_template=True)
    assert "data.apply_chat_template=true" in note


def test_a_file_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says("agent.py", "no_such_package")):
        tried(tmp_path, f"import no_such_package\n{reset('return states')}")


@pytest.mark.parametrize("recipe", ["grpo", "multi_turn", "openrlhf_ppo", "reinforce_pp", "verl_ppo"])
def test_every_recipe_tries_its_agent(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agent.py").write_text(reset("return {'observation': states['extra_info']['solution']}"))
    options = [f"agent.func_path={tmp_path}/agent.py", f"run_dir={tmp_path}/run", "backend=local"]
    if recipe != "multi_turn":
        options.append("data.path=task:sort")
    assert import_module(f"recipes.{recipe}.main").main(options) == 2
    assert re.search(says("agent.func_path", "row 0 of the data", "solution"), capsys.readouterr().err)
    assert not (tmp_path / "run").exists()
