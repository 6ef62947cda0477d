"""Targets: their kinds, messages for unusable ones, and the samples of users."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.samples import Sample, read_samples
from tests.contracts.targets import Unusable, load_target, try_target
from tests.contracts.test_broken_parts import run_contracts
from tests.messages import says

FUNCTIONS = """
def reward_func(first, second): ...
def whole_batch(queries, prompts, labels): ...
def named(queries, **others): ...
def score(response, label): return 1.0
number = 3
"""
AGENTS = """
class Base:
    def __init__(self, agent_instance_cls):
        self.made_of = agent_instance_cls
    async def execute(self): ...
class AgentInstance:
    async def reset(self, states, **kwargs): return {"observation": states["observation"]}
    async def step(self, states, **kwargs): ...
class AgentExecutor(Base):
    def __init__(self):
        super().__init__(AgentInstance)
class Alone(Base):
    def __init__(self):
        super().__init__(None)
"""
SCORE = "def score(response, label):\n    return float(response.strip() == label)\n"
# Episodes differ, because the number is random, so --allow-random is needed.
GAME = """
import random
class AgentInstance:
    async def reset(self, states):
        self.secret, self.turns = random.random(), 0
        return {"observation": [{"role": "user", "content": states["observation"]}]}
    async def step(self, states):
        assert states["action_text"] in ("left", "right", "") or len(states["action_text"]) > 1
        self.turns += 1
        return {"rewards": self.secret, "scores": 1, "environment_feedback": "on", "done": self.turns >= 2}
"""


@pytest.fixture(autouse=True)
def forget_modules() -> Iterator[None]:
    """Let each test load different files with the same names."""
    modules = set(sys.modules)
    path = list(sys.path)
    yield
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    sys.path[:] = path


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "name", "kind"),
    [
        (FUNCTIONS, "", "reward"),
        (FUNCTIONS, ":reward_func", "reward"),
        (FUNCTIONS, ":whole_batch", "reward"),
        (FUNCTIONS, ":named", "reward"),
        (FUNCTIONS, ":score", "scorer"),
        (AGENTS, "", "agent"),
        (AGENTS, ":AgentExecutor", "agent"),
    ],
)
def test_the_kind_of_a_target_is_inferred_from_its_form(tmp_path: Path, text: str, name: str, kind: str) -> None:
    target = load_target(written(tmp_path, "parts.py", text) + name)
    assert (target.kind, kind == "agent") == (kind, target.value.__name__ == "AgentInstance")


def test_a_scorer_is_loaded_by_its_name_and_an_explicit_kind_is_used(tmp_path: Path) -> None:
    assert load_target("gsm8k").kind == "scorer"
    assert load_target(written(tmp_path, "parts.py", FUNCTIONS) + ":score", "reward").kind == "reward"


@pytest.mark.parametrize(
    ("text", "name", "facts"),
    [
        (SCORE, "", ["reward_func", "AgentInstance", "AgentExecutor", ": score"]),
        (SCORE, ":scores", ["'scores'"]),
        (FUNCTIONS, ":number", ["number", "int", "(queries, prompts, labels)", "(response, label)"]),
        (AGENTS, ":Alone", ["Alone", "executor", "reset", "step"]),
        ("import json\n1 / 0\n", "", ['.py", line 2, in <module>\n    1 / 0']),
        ("import nothing_of_this_name\n", "", ["ModuleNotFoundError: No module named 'nothing_of_this_name'"]),
        ("raise SystemExit('no licence')\n", "", ["SystemExit: no licence"]),
    ],
)
def test_a_target_that_cannot_be_loaded_has_the_reason(tmp_path: Path, text: str, name: str, facts: list[str]) -> None:
    target = try_target(written(tmp_path, "parts.py", text) + name, None)
    assert isinstance(target, Unusable)
    assert re.search(says("parts.py", *facts), target.reason)


def test_only_the_file_of_a_scorer_needs_an_importable_name(tmp_path: Path) -> None:
    # A reward file is loaded by its path, a scorer by its module.
    assert load_target(written(tmp_path, "random.py", FUNCTIONS)).kind == "reward"
    with pytest.raises(ValueError, match=says("random.py", "'random'")):
        load_target(written(tmp_path, "random.py", FUNCTIONS) + ":score")


def test_a_missing_module_or_file_is_unusable() -> None:
    for spec, facts in (
        ("nowhere.module:score", ["'nowhere.module'", Path.cwd()]),
        ("gsm9k", ["'gsm9k'", "exact_match, gsm8k"]),
        ("nowhere.py", ["'nowhere.py'", Path.cwd()]),
    ):
        target = try_target(spec, None)
        assert isinstance(target, Unusable)
        assert re.search(says(*facts), target.reason)


def rows_file(folder: Path, *rows: Any) -> Path:
    return Path(written(folder, "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))


def test_rows_may_have_queries_or_responses_or_neither(tmp_path: Path) -> None:
    rows = [
        {"query": "1+1=2", "prompt": "1+1=", "label": 2},
        {"response": "7", "label": None},
        {"input": "1+2=", "label": "3"},
        {"prompt": "go", "query": "<s>go left", "response": "left", "actions": ["left", "right"]},
    ]
    assert read_samples(rows_file(tmp_path, *rows)) == [
        Sample("1+1=", "2", 2, "1+1=2", ("2",)),
        Sample("", "7", "", "7", ("7",)),  # null counts as a missing label
        Sample("1+2=", "3", "3", "1+2=3", ("3",)),
        Sample("go", "left", "", "<s>go left", ("left", "right")),
    ]


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"question": "q", "label": "3"}, [["label", "question"], "prompt", "query", "response"]),
        ({"query": "<s>q a", "prompt": "q"}, ["query", "prompt", "response"]),
        ({"prompt": "q", "actions": "left"}, ["'actions'"]),
    ],
)
def test_an_invalid_row_raises_an_error_that_names_it(tmp_path: Path, row: dict[str, Any], facts: list[object]) -> None:
    with pytest.raises(ValueError, match=says("rows.jsonl", "row 0", *facts)):
        read_samples(rows_file(tmp_path, row))


def test_the_users_rows_are_used_and_random_results_can_be_allowed(tmp_path: Path) -> None:
    written(tmp_path, "game.py", GAME)
    written(tmp_path, "broken.py", "from mine import nothing\n")
    rows = rows_file(tmp_path, {"prompt": "go", "label": "left", "actions": ["left", "right"]})
    arguments = ["--target=game.py", "--target=broken.py", f"--samples={rows}", "--allow-random"]
    failures, printed = run_contracts(tmp_path, *arguments)
    (message,) = failures.pop("broken.py").values()
    assert "ModuleNotFoundError: No module named 'mine'" in message
    assert 'broken.py", line 1, in <module>' in message
    assert failures == {"game.py": {}}
    # 4 of the 20 contracts of an agent are waived. Each of the two targets has one contract for its import.
    assert "1 failed, 17 passed, 4 deselected" in printed


CHAT_REWARD = """
def accuracy(prompts, completions, solution):
    assert all(turns[-1]["role"] == "user" for turns in prompts)
    return [float(answer in turns[0]["content"]) for answer, turns in zip(solution, completions)]
"""


def test_the_reward_function_of_own_data_md_fulfils_the_contracts(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "own_data.md").read_text()
    block = re.search(r"```python\n(# my_reward\.py.*?)```", page, re.DOTALL)
    assert block is not None
    written(tmp_path, "my_reward.py", block[1])
    failures, printed = run_contracts(tmp_path, "--target=my_reward.py")
    assert failures == {"my_reward.py": {}}, printed


def test_the_reward_receives_columns_and_chat_messages_of_the_users_rows(tmp_path: Path) -> None:
    written(tmp_path, "chat.py", CHAT_REWARD)
    turns = [{"role": "user", "content": "1 + 2?"}]
    rows = [
        {"prompt": turns, "solution": str(number), "label": "", "response": f"it is {number}"} for number in range(3)
    ]
    samples = read_samples(rows_file(tmp_path, *rows))
    assert samples[1] == Sample("1 + 2?", "it is 1", "", columns={"prompt": turns, "solution": "1"})
    failures, printed = run_contracts(tmp_path, "--target=chat.py:accuracy", f"--samples={tmp_path}/rows.jsonl")
    assert failures == {"chat.py:accuracy": {}}, printed


CLIENT = """
import openai
from agents.executor import SingleTurnAgentExecutor
from agents.openai_executor import OpenAIAgentExecutor

class AgentExecutor(OpenAIAgentExecutor):
    def run_agent(self, prompt, label, *, base_url, api_key, session_id, extra_info):
        messages = [{"role": "user", "content": prompt}]
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for turn in range(2):
                choice = client.chat.completions.create(model="policy", messages=messages).choices[0]
                messages.append({"role": "assistant", "content": choice.message.content or ""})
                messages.append({"role": "user", "content": "Are you sure?"})
        return {"reward": float(str(label) in messages[-2]["content"])%s}

class Single(SingleTurnAgentExecutor):
    def __init__(self):
        super().__init__(lambda completions: [float(len(completion)) for completion in completions])
"""


@pytest.mark.nightly
def test_executors_are_tested_by_the_contracts(tmp_path: Path) -> None:
    written(tmp_path, "client.py", CLIENT % "")
    written(tmp_path, "random_client.py", ("import random\n" + CLIENT) % " + random.random()")
    targets = ["client.py", "client.py:Single", "random_client.py"]
    failures, printed = run_contracts(tmp_path, "--deadline=60", *(f"--target={target}" for target in targets))
    assert set(failures.pop("random_client.py")) >= {"test_equal_actions_give_equal_episodes"}
    assert failures == {"client.py": {}, "client.py:Single": {}}, printed
