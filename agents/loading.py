"""Checking and loading of agent files and shipped environments."""

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
from components.process.child_process import described
from components.process.code_files import load_file
from components.registry import MissingPlugin, find, names
from components.rewards.files import check_defines

SHIPPED_PREFIX = "env:"
SHIPPED = Path(__file__).parent / "environments"
KIND = "environment"
"""Kind of plug-ins that provide environments. A plug-in maps a name to the path of an agent file, such as
`guess:__file__`."""
NAMES = ("AgentExecutor", "AgentInstance")
"""Names that an agent file may define. The first one that it defines is used."""


def check_agent(func_path: str) -> None:
    """Check an agent file without running it.

    Raises:
        ValueError: the file or environment does not exist, is not valid Python, defines neither `AgentExecutor` nor
            `AgentInstance`, or imports from openrlhf.
    """
    tree = check_defines(str(agent_file(func_path)), "agent file", NAMES, "AgentExecutor or AgentInstance")
    for node in tree.body:
        # The base classes of `agents` have the same names, so only the line of the import must change.
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "openrlhf":
            raise ValueError(
                f"agent file {func_path!r} imports from {node.module} (line {node.lineno}); "
                f"write `from agents import {', '.join(alias.name for alias in node.names)}` instead"
            )


def load_agent(func_path: str, arguments: Mapping[str, Any] | None = None) -> AgentExecutorBase:
    """Load an agent, and return its executor.

    Args:
        func_path: path of the agent file, or `env:` and the name of an environment.
        arguments: keyword arguments of the class that the file defines.

    Raises:
        ValueError: the file raises, or does not define an agent.
    """
    arguments = arguments or {}
    check_agent(func_path)
    module = load_agent_file(func_path)
    name = next(name for name in NAMES if hasattr(module, name))
    defined = getattr(module, name)
    try:
        if name == "AgentInstance":
            if arguments:
                defined = partial(defined, **arguments)
            return MultiTurnAgentExecutor(defined)
        if arguments and not inspect.isclass(defined):
            raise ValueError("it is an object, which takes no agent.arguments; unset them, or define a class")
        executor = defined
        if inspect.isclass(defined):
            executor = defined(**arguments)
    except Exception as error:
        raise _failed(f"{name} in {func_path!r} cannot be created with arguments {dict(arguments)}", error) from error
    if not isinstance(executor, AgentExecutorBase):
        raise ValueError(
            f"AgentExecutor in {func_path!r} is a {type(executor).__name__}; derive it from MultiTurnAgentExecutor, "
            "SingleTurnAgentExecutor or AgentExecutorBase of `agents`"
        )
    return executor


def load_agent_file(func_path: str) -> ModuleType:
    """Import an agent file, which can import modules of its folder.

    Raises:
        ValueError: the file raises.
    """
    path = agent_file(func_path)
    if not func_path.startswith(SHIPPED_PREFIX) and str(path.parent) not in sys.path:
        # Appended at the end, so that a helper named random.py does not replace Python's module.
        sys.path.append(str(path.parent))
    try:
        return load_file(path)
    # The user's file may also call sys.exit.
    except (Exception, SystemExit) as error:
        raise _failed(f"agent file {func_path!r} cannot be loaded", error) from error


def agent_file(func_path: str) -> Path:
    """Return the path of an agent file.

    Raises:
        MissingPlugin: no environment has that name.
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
    raise MissingPlugin(f"no environment or plug-in is named {func_path!r}; set agent.func_path to one of {known}")


def environment_names() -> list[str]:
    """Return the names of the shipped environments and of those of plug-ins."""
    return sorted({*(file.stem for file in SHIPPED.glob("[!_]*.py")), *names(KIND)})


def _failed(problem: str, error: BaseException) -> ValueError:
    reason, trace = described(error)
    failed = ValueError(f"{problem}: {reason}")
    failed.add_note(trace)
    return failed
