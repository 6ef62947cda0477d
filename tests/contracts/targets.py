"""What `--target` names: a scorer by its name, a function, or an agent, found and told apart.

Nothing here imports pytest or torch: the processes that run a target import this file too.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from agents.episode import AgentExecutorBase
from components.rewards.base import FUNCTION_NAME
from components.rewards.functions import OF_ALL, OF_ONE, OURS, TRL
from components.rewards.scorers import get_scorer, scorer_names

Kind = Literal["reward", "scorer", "agent"]
KINDS: tuple[Kind, ...] = get_args(Kind)
USUAL_NAMES = (FUNCTION_NAME, "AgentInstance", "AgentExecutor")
"""What is taken from a file or module when the target names nothing in it."""
REWARD_PARAMETERS = 3
"""A reward function takes so many at least: queries, prompts and labels."""
OWN_LABELS = {"reasoning_gym"}
"""Scorers that can use no label but those which came with their own prompts: their contract needs --samples."""

EXAMPLES = Path(__file__).resolve().with_name("examples")


@dataclass(frozen=True)
class Target:
    """One part under contract."""

    spec: str
    """As it was asked for."""
    address: str
    """The same for other processes: with an absolute path, and with the name of what is meant."""
    kind: Kind
    value: Any
    """The function, or the class or instance of an agent."""


@dataclass(frozen=True)
class Unusable:
    """A target that could not be loaded."""

    spec: str
    reason: str
    """With the traceback, where it is the target's own code that failed."""


def shipped_specs() -> list[str]:
    """List the parts that come with the project: the scorers that can use generated labels, and the examples."""
    scorers = [name for name in scorer_names() if name not in OWN_LABELS]
    return [*scorers, *(str(path) for path in sorted(EXAMPLES.glob("*.py")))]


def try_target(spec: str, kind: Kind | None) -> Target | Unusable:
    """Load a target, or say why it cannot be."""
    try:
        return load_target(spec, kind)
    except ValueError as error:
        return Unusable(spec, str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's module may raise anything
        # The frames before the user's own are ours and importlib's.
        trace = "".join(traceback.format_exception(error)).rstrip()
        return Unusable(spec, f"{spec} cannot be imported: {type(error).__name__}: {error}\n\n{trace}")


def load_target(spec: str, kind: Kind | None = None) -> Target:
    """Load what a spec names; ValueError when there is nothing of the kind."""
    if spec in scorer_names():
        return Target(spec, spec, kind or "scorer", get_scorer(spec))
    source, name = _split(spec)
    module = _load_module(source)
    if not name:
        name = next((usual for usual in USUAL_NAMES if hasattr(module, usual)), "")
    if not name:
        found = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ValueError(
            f"{spec} defines none of {', '.join(USUAL_NAMES)}; name what is meant, as in {source}:NAME. It defines: "
            f"{', '.join(found) or 'nothing'}"
        )
    try:
        value = reduce(getattr, name.split("."), module)
    except AttributeError as error:
        raise ValueError(f"{spec}: {error}; set what stands after the colon to a name that is there") from error
    address = f"{Path(source).expanduser().resolve() if source.endswith('.py') else source}:{name}"
    found = kind or _kind_of(value, spec)
    if found == "scorer" and source.endswith(".py"):
        _make_importable(Path(source).expanduser().resolve())
    return Target(spec, address, found, _agent_of(value, spec) if found == "agent" else value)


def load_value(address: str, kind: Kind) -> Any:
    """Load a target's function or agent in a process that was given its address."""
    return load_target(address, kind).value


def _split(spec: str) -> tuple[str, str]:
    source, colon, name = spec.rpartition(":")
    return (source, name) if colon else (spec, "")


def _load_module(source: str) -> ModuleType:
    if not source.endswith(".py"):
        try:
            found = importlib.util.find_spec(source)
        except ModuleNotFoundError as error:
            # Of my.module, my was looked for; what a package itself cannot import is another matter.
            if error.name is None or not f"{source}.".startswith(f"{error.name}."):
                raise
            found = None
        if found is None:
            raise ValueError(
                f"there is no module {source!r} in {Path.cwd()} or on PYTHONPATH, and no scorer of that name; give "
                f"module:name, the path of a .py file, or one of the scorers {', '.join(scorer_names())}"
            )
        return importlib.import_module(source)
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"the file {source!r} does not exist (looked in {Path.cwd()}); give the path of a .py file")
    name = module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    # Registered first: dataclasses and pickling look their module up here while the file still runs.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def module_name(path: Path) -> str:
    """Give the name that a file gets as a module: its own, unless that is another module's."""
    if path.stem.isidentifier():
        loaded = sys.modules.get(path.stem)
        found = importlib.util.find_spec(path.stem) if loaded is None else None
        known = found.origin if found else getattr(loaded, "__file__", None)
        if known == str(path) or (loaded is None and found is None):
            return path.stem
    return f"contract_target_{path.stem}".replace(".", "_")


def _make_importable(path: Path) -> None:
    """Let other processes import a file by its name, as they do with a scorer; a reward file is loaded by its path."""
    if module_name(path) != path.stem:
        raise ValueError(f"{path} cannot be imported as {path.stem!r}: that is no name, or another module's; rename it")
    if str(path.parent) not in sys.path:
        # At the end: nothing in the user's folder hides a module of Python's or of ours.
        sys.path.append(str(path.parent))


def _kind_of(value: Any, spec: str) -> Kind:
    if _is_agent(value) or _executes(value):
        return "agent"
    if not callable(value) or inspect.isclass(value):
        raise ValueError(
            f"{spec} is a {type(value).__name__}; a target is a function of (queries, prompts, labels), a function of "
            "(response, label), or an agent with async reset and step. --kind says which is meant"
        )
    parameters = inspect.signature(value).parameters.values()
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    is_named = not names.isdisjoint((*OURS, *TRL, *OF_ONE, *OF_ALL))
    if getattr(value, "__name__", "") == FUNCTION_NAME or open_ended or is_named or len(names) >= REWARD_PARAMETERS:
        return "reward"
    return "scorer"


def _is_agent(value: Any) -> bool:
    return all(callable(getattr(value, method, None)) for method in ("reset", "step"))


def _executes(value: Any) -> bool:
    return callable(getattr(value, "execute", None))


def _agent_of(value: Any, spec: str) -> Any:
    """Find the agent, or the class that an executor makes its agents of."""
    if _is_agent(value):
        return value
    make: Callable[[], Any] = value if inspect.isclass(value) else lambda: value
    if _executes(value):
        executor = make()
        for held in vars(executor).values():
            if inspect.isclass(held) and _is_agent(held):
                return held
        if isinstance(executor, AgentExecutorBase):
            return value
        raise ValueError(
            f"{spec} is an executor that holds no class with reset and step, and no AgentExecutorBase; give the class "
            "of its agents"
        )
    raise ValueError(f"{spec} is no agent: it has no reset and step; give a class that has both, as async functions")
