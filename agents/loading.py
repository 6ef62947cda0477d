"""A user's agent file, or a shipped environment: checked before a run begins, and loaded where episodes are run."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from agents.episode import AgentExecutorBase
from agents.executor import MultiTurnAgentExecutor
from components.process.child_process import described, load_file
from components.registry import MissingPlugin, find, names
from components.rewards.base import check_defines

SHIPPED_PREFIX = "env:"
SHIPPED = Path(__file__).parent / "environments"
KIND = "environment"
"""Kind of the plug-ins that provide environments: the path of an agent file, such as `guess:__file__`, by its name."""
NAMES = ("AgentExecutor", "AgentInstance")
"""What an agent file defines; the first that is there counts."""


def check_agent(func_path: str) -> None:
    """Refuse what `load_agent` could not load, without running the file.

    Raises:
        ValueError: there is no such file or environment, it is no valid Python, defines neither `AgentExecutor` nor
            `AgentInstance`, or imports from openrlhf.
    """
    tree = check_defines(str(agent_file(func_path)), "agent file", NAMES, "AgentExecutor or AgentInstance")
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "openrlhf":
            raise ValueError(
                f"agent file {func_path!r} imports from {node.module} (line {node.lineno}); "
                f"write `from agents import {', '.join(alias.name for alias in node.names)}` there"
            )


def load_agent(func_path: str, arguments: Mapping[str, Any] | None = None) -> AgentExecutorBase:
    """Load an agent; ValueError when its file raises, or what it defines is no agent.

    Args:
        func_path: the file, or a shipped environment.
        arguments: keyword arguments of what it defines.
    """
    arguments = arguments or {}
    check_agent(func_path)
    module = load_agent_file(func_path)
    name = next(name for name in NAMES if hasattr(module, name))
    defined = getattr(module, name)
    try:
        if name == "AgentInstance":
            return MultiTurnAgentExecutor(partial(defined, **arguments) if arguments else defined)
        if arguments and not inspect.isclass(defined):
            raise ValueError("it is an object, which takes no agent.arguments; leave them out, or define a class")
        executor = defined(**arguments) if inspect.isclass(defined) else defined
    except Exception as error:
        raise _failed(f"{name} in {func_path!r} cannot be made with arguments {dict(arguments)}", error) from error
    if not isinstance(executor, AgentExecutorBase):
        raise ValueError(
            f"AgentExecutor in {func_path!r} is a {type(executor).__name__}; derive it from MultiTurnAgentExecutor, "
            "SingleTurnAgentExecutor or AgentExecutorBase of `agents`"
        )
    return executor


def load_agent_file(func_path: str) -> ModuleType:
    """Run the file of an agent, which finds modules that lie beside it; ValueError when it raises."""
    path = agent_file(func_path)
    if not func_path.startswith(SHIPPED_PREFIX) and str(path.parent) not in sys.path:
        # Last: a helper called random.py must not be taken for Python's own.
        sys.path.append(str(path.parent))
    try:
        return load_file(path)
    except (Exception, SystemExit) as error:
        raise _failed(f"agent file {func_path!r} cannot be loaded", error) from error


def agent_file(func_path: str) -> Path:
    """Return the path of an agent's file.

    Raises:
        MissingPlugin: there is no environment of that name.
    """
    if not func_path.startswith(SHIPPED_PREFIX):
        return Path(func_path).expanduser().absolute()
    name = func_path.removeprefix(SHIPPED_PREFIX)
    path = SHIPPED / f"{name}.py"
    if path.is_file():
        return path
    if (provided := find(KIND, name)) is not None:
        return Path(provided)
    known = ", ".join(f"{SHIPPED_PREFIX}{name}" for name in environment_names())
    raise MissingPlugin(f"there is no environment {func_path!r}, and no plug-in provides it; there are {known}")


def environment_names() -> list[str]:
    """List the names of the environments here and of plug-ins."""
    return sorted({*(file.stem for file in SHIPPED.glob("[!_]*.py")), *names(KIND)})


def _failed(what: str, error: BaseException) -> ValueError:
    reason, trace = described(error)
    failed = ValueError(f"{what}: {reason}")
    failed.add_note(trace)
    return failed
