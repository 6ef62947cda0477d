"""Loading of the part that `--target` names: a scorer by its name, a function, or an agent.

This module imports neither pytest nor torch, because the processes that run a target import it too.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from agents.episode import AgentExecutorBase
from components.rewards.files import FUNCTION_NAME
from components.rewards.scorers import get_scorer, scorer_names
from plugins.reward_functions.functions import OF_ALL, OF_ONE, OURS, TRL

Kind = Literal["reward", "scorer", "agent"]
KINDS: tuple[Kind, ...] = get_args(Kind)
USUAL_NAMES = (FUNCTION_NAME, "AgentInstance", "AgentExecutor")
"""Names that are looked up in a file or module if the target has no name."""
REWARD_PARAMETERS = 3
"""Minimum number of parameters of a reward function: queries, prompts and labels."""
OWN_LABELS = {"reasoning_gym"}
"""Scorers that need the labels of their own prompts. Their contracts need --samples."""

EXAMPLES = Path(__file__).resolve().with_name("examples")


@dataclass(frozen=True)
class Target:
    """One part under contract."""

    spec: str
    """Value of --target."""
    address: str
    """Absolute form of `spec` for other processes, with the name of the part."""
    kind: Kind
    value: Any
    """Function, or class or instance of an agent."""


@dataclass(frozen=True)
class Unusable:
    """A target that cannot be loaded."""

    spec: str
    reason: str
    """Reason, with a traceback if the code of the target has raised."""


def shipped_specs() -> list[str]:
    """Return the shipped parts: the scorers that can use generated labels, and the examples."""
    scorers = [name for name in scorer_names() if name not in OWN_LABELS]
    return [*scorers, *(str(path) for path in sorted(EXAMPLES.glob("*.py")))]


def try_target(spec: str, kind: Kind | None) -> Target | Unusable:
    """Load a target, or return the reason for which it cannot be loaded."""
    try:
        return load_target(spec, kind)
    except ValueError as error:
        return Unusable(spec, str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's module may raise anything
        # The complete traceback, in which the frames of the user's module follow those of importlib.
        trace = "".join(traceback.format_exception(error)).rstrip()
        return Unusable(spec, f"{spec} cannot be imported: {type(error).__name__}: {error}\n\n{trace}")


def load_target(spec: str, kind: Kind | None = None) -> Target:
    """Load the part that a spec names. Raises ValueError if it does not exist or is of no known kind."""
    if spec in scorer_names():
        return Target(spec, spec, kind or "scorer", get_scorer(spec))
    source, name = _split(spec)
    module = _load_module(source)
    if not name:
        name = next((usual for usual in USUAL_NAMES if hasattr(module, usual)), "")
    if not name:
        defined = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ValueError(
            f"{spec} defines none of {', '.join(USUAL_NAMES)}; add the name of the part, as in {source}:NAME. It "
            f"defines: {', '.join(defined) or 'nothing'}"
        )
    try:
        value = reduce(getattr, name.split("."), module)
    except AttributeError as error:
        raise ValueError(f"{spec}: {error}; set an existing name after the colon") from error
    kind = kind or _kind_of(value, spec)
    if source.endswith(".py"):
        path = Path(source).expanduser().resolve()
        source = str(path)
        if kind == "scorer":
            _make_importable(path)
    if kind == "agent":
        value = _agent_of(value, spec)
    return Target(spec, f"{source}:{name}", kind, value)


def load_value(address: str, kind: Kind) -> Any:
    """Load the function or agent of a target by its address."""
    return load_target(address, kind).value


def _split(spec: str) -> tuple[str, str]:
    source, colon, name = spec.rpartition(":")
    if not colon:
        return spec, ""
    return source, name


def _load_module(source: str) -> ModuleType:
    if not source.endswith(".py"):
        try:
            module_spec = importlib.util.find_spec(source)
        except ModuleNotFoundError as error:
            # A missing package of `source` is handled below. A failed import inside a package is an error of its code.
            if error.name is None or not f"{source}.".startswith(f"{error.name}."):
                raise
            module_spec = None
        if module_spec is None:
            raise ValueError(
                f"no module {source!r} in {Path.cwd()} or on PYTHONPATH, and no scorer of that name; set module:name, "
                f"the path of a .py file, or one of the scorers {', '.join(scorer_names())}"
            )
        return importlib.import_module(source)
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"the file {source!r} does not exist (looked in {Path.cwd()}); set the path of a .py file")
    name = module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    # Registered before execution, because dataclasses and pickling look their module up while the file runs.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def module_name(path: Path) -> str:
    """Return the module name for a file: the file's name, unless another module has that name."""
    if path.stem.isidentifier():
        loaded = sys.modules.get(path.stem)
        if loaded is not None:
            is_free = getattr(loaded, "__file__", None) == str(path)
        else:
            module_spec = importlib.util.find_spec(path.stem)
            is_free = module_spec is None or module_spec.origin == str(path)
        if is_free:
            return path.stem
    return f"contract_target_{path.stem}".replace(".", "_")


def _make_importable(path: Path) -> None:
    """Let other processes import a file by its name, as they do for a scorer. A reward file is loaded by its path."""
    if module_name(path) != path.stem:
        problem = f"{path.stem!r} is not an identifier, or the name of another module"
        raise ValueError(f"{path} cannot be imported: {problem}; rename it")
    if str(path.parent) not in sys.path:
        # Appended at the end, so that no file of the user's folder replaces a module of Python or of this project.
        sys.path.append(str(path.parent))


def _kind_of(value: Any, spec: str) -> Kind:
    if _is_agent(value) or _executes(value):
        return "agent"
    if not callable(value) or inspect.isclass(value):
        raise ValueError(
            f"{spec} is a {type(value).__name__}; a target is a function of (queries, prompts, labels), a function of "
            "(response, label), or an agent with async reset and step. Set --kind to one of them"
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
    """Return the agent itself, or the agent class that an executor has as an attribute."""
    if _is_agent(value):
        return value
    if _executes(value):
        executor = value
        if inspect.isclass(value):
            executor = value()
        for attribute in vars(executor).values():
            if inspect.isclass(attribute) and _is_agent(attribute):
                return attribute
        if isinstance(executor, AgentExecutorBase):
            return value
        raise ValueError(
            f"{spec} is an executor without a class with reset and step, and not an AgentExecutorBase; set the class "
            "of its agents"
        )
    raise ValueError(f"{spec} is not an agent: it has no reset and step; set a class with both as async functions")
