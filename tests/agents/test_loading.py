"""Agent files: checks before a run without running the file, and loading."""

import subprocess
import sys
from pathlib import Path

import pytest

from agents import MultiTurnAgentExecutor, SingleTurnAgentExecutor
from agents.loading import check_agent, environment_names, load_agent
from tests.messages import says

PROJECT = Path(__file__).resolve().parents[2]
INSTANCE = """
class AgentInstance:
    async def reset(self, states): ...
    async def step(self, states): ...
"""


def written(folder: Path, text: str) -> str:
    path = folder / "agent.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("class Agent:\n    pass\n", ["agent.py", "AgentExecutor", "AgentInstance", ": Agent"]),
        ("AgentInstance = [\n", ["agent.py", "'['"]),
        (
            "import os\nfrom openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor\n" + INSTANCE,
            ["agent.py", "openrlhf.utils.agent", "line 2", "from agents import AgentInstanceBase, Multi"],
        ),
    ],
)
def test_a_file_without_an_agent_is_rejected_without_running_it(tmp_path: Path, text: str, facts: list[str]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        check_agent(written(tmp_path, f"{text}\nraise SystemExit\n"))


def test_a_missing_file_or_environment_is_named() -> None:
    with pytest.raises(ValueError, match="/no/agent"):
        check_agent("/no/agent.py")
    with pytest.raises(ValueError, match=says("'env:ches'", "env:guess")):
        check_agent("env:ches")


@pytest.mark.parametrize("text", [INSTANCE, "AgentInstance = object\n", "from agents import x as AgentExecutor\n"])
def test_a_file_with_an_agent_is_accepted_without_running_it(tmp_path: Path, text: str) -> None:
    check_agent(written(tmp_path, f"{text}\nraise SystemExit\n"))


def test_the_check_does_not_import_torch() -> None:
    check = "from agents.loading import check_agent; check_agent('env:guess')"
    code = f"{check}; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PROJECT)


def test_every_shipped_environment_passes_the_check() -> None:
    names = environment_names()
    assert {"calculator", "guess", "code"} <= {*names}  # in agents/environments and in two plug-ins
    for name in names:
        check_agent(f"env:{name}")


def test_an_agent_instance_alone_is_run_by_the_multi_turn_executor(tmp_path: Path) -> None:
    executor = load_agent(written(tmp_path, INSTANCE))
    assert type(executor) is MultiTurnAgentExecutor
    assert executor.agent_instance.__name__ == "AgentInstance"


@pytest.mark.parametrize("end", ["", "\nAgentExecutor = AgentExecutor()"])
def test_an_executor_may_be_a_class_or_an_instance(tmp_path: Path, end: str) -> None:
    text = f"{INSTANCE}\nfrom agents import SingleTurnAgentExecutor\nclass AgentExecutor(SingleTurnAgentExecutor): ..."
    # The executor is used although the file also has an AgentInstance.
    assert isinstance(load_agent(written(tmp_path, text + end)), SingleTurnAgentExecutor)


def test_a_file_can_import_modules_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_agent.py").write_text(INSTANCE)
    # Modules of the standard library have precedence over files next to the agent.
    (tmp_path / "this.py").write_text("raise SystemExit")
    monkeypatch.delitem(sys.modules, "this", raising=False)
    text = "import this\nfrom beside_the_agent import AgentInstance"
    executor = load_agent(written(tmp_path, text))
    assert isinstance(executor, MultiTurnAgentExecutor)
    assert executor.agent_instance.__module__ == "beside_the_agent"


@pytest.mark.parametrize("line", ["raise KeyError('board')", "raise SystemExit('board')"])
def test_an_exception_of_a_file_is_reported_in_one_line_with_its_traceback(tmp_path: Path, line: str) -> None:
    with pytest.raises(ValueError, match=says(tmp_path / "agent.py", "board")) as caught:
        load_agent(written(tmp_path, f"{INSTANCE}\n{line}\n"))
    assert line in caught.value.__notes__[0]


def test_an_invalid_executor_and_missing_arguments_raise_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says("AgentExecutor", tmp_path / "agent.py", "int", "MultiTurn")):
        load_agent(written(tmp_path, "AgentExecutor = 3"))
    text = "from agents import MultiTurnAgentExecutor\nclass AgentExecutor(MultiTurnAgentExecutor): ..."
    with pytest.raises(ValueError, match=says("AgentExecutor", tmp_path / "agent.py", "TypeError: ", "agent_instance")):
        load_agent(written(tmp_path, text))
