"""Rewards: scorers by name, and reward functions from a user's Python file, called the same way.

B sequences. torch is imported when the first reward is computed, so that a plan check can call
`check_reward` without it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from components.data.tasks import TASKS, get_task

if TYPE_CHECKING:
    from torch import Tensor

Scorer = Callable[[str, Any], float]
"""Scores one response against its label; both without special tokens."""

FUNCTION_NAME = "reward_func"
"""What a reward file defines: reward_func(queries, prompts, labels, **kwargs)."""


@dataclass(frozen=True)
class RewardOutput:
    """The rewards of one batch, in its order."""

    reward_B: Tensor
    """[B] float32: what the policy is trained on."""
    score_B: Tensor
    """[B] float32: how good the response is, from 0 to 1; filters and evaluation read it. The reward, unless given."""
    logs: dict[str, Tensor]
    """Further numbers to log, each [B] float32; a single number was repeated for every sequence."""


def exact_match(response: str, label: Any) -> float:
    """Give 1.0 when the response is the label, but for white space at the ends."""
    return 1.0 if response.strip() == str(label).strip() else 0.0


_SCORERS: dict[str, Scorer] = {"exact_match": exact_match}


def register_scorer(name: str, scorer: Scorer) -> None:
    """Make a scorer available under a name of its own."""
    if name in _SCORERS or name in TASKS:
        raise ValueError(f"there is a scorer named {name!r} already; choose another name")
    _SCORERS[name] = scorer


def scorer_names() -> list[str]:
    """List the names that `load_reward_function` knows: the tasks and the registered scorers."""
    return sorted({*_SCORERS, *TASKS})


def get_scorer(name: str) -> Scorer:
    """Look up the scorer of a task, or a registered one."""
    if name in TASKS:
        return get_task(name).score
    if name not in _SCORERS:
        raise ValueError(f"there is no scorer {name!r}; set it to one of: {', '.join(scorer_names())}, or a .py file")
    return _SCORERS[name]


def check_reward(spec: str) -> None:
    """Refuse what `load_reward_function` could not load, without running the user's file."""
    if not spec.endswith(".py"):
        get_scorer(spec)
        return
    path = Path(spec).expanduser()
    if not path.is_file():
        raise ValueError(f"reward file {spec!r} does not exist (looked in {Path.cwd()}); give the path of a .py file")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except SyntaxError as error:
        raise ValueError(f"reward file {spec!r} is not valid Python: {error}") from error
    if FUNCTION_NAME in _top_level_names(tree):
        return
    found = ", ".join(node.name for node in tree.body if isinstance(node, ast.FunctionDef)) or "none"
    raise ValueError(
        f"reward file {spec!r} does not define {FUNCTION_NAME}(queries, prompts, labels, **kwargs); "
        f"functions found: {found}"
    )


class RewardFunction:
    """A scorer or a user's function behind one call that checks what comes back."""

    def __init__(self, source: str, function: Callable[..., Any]) -> None:
        """Wrap `function`, whose arguments are those of `reward_func`; `source` names it in errors."""
        self.source = source
        self._function = function
        self._accepted = _accepted_keywords(function)

    def __call__(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        *,
        responses: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> RewardOutput:
        """Reward B sequences.

        Args:
            queries: prompt and response as one text, special tokens as the caller decoded them.
            prompts: the prompts' text.
            labels: as the data has them.
            responses: the responses alone, without special tokens. The built-in scorers read them; left out, a
                response is what follows the prompt in its query.
            kwargs: passed on as far as the function takes them.
        """
        count = len(queries)
        if responses is None:
            responses = [_response_of(query, prompt) for query, prompt in zip(queries, prompts, strict=True)]
        for name, column in (("prompts", prompts), ("labels", labels), ("responses", responses)):
            if len(column) != count:
                raise ValueError(f"{self.source}: {count} queries came with {len(column)} {name}; give one for each")
        extra = {"responses": list(responses), **kwargs}
        if self._accepted is not None:
            extra = {name: value for name, value in extra.items() if name in self._accepted}
        result = self._function(list(queries), list(prompts), list(labels), **extra)
        return _checked(result, count, prompts, self.source)


def load_reward_function(spec: str) -> RewardFunction:
    """Load a reward by name (`sort`, `exact_match`, ...) or from a .py file that defines `reward_func`."""
    check_reward(spec)
    if not spec.endswith(".py"):
        return RewardFunction(f"scorer {spec!r}", _over_batch(get_scorer(spec)))
    function = getattr(_load_file(Path(spec).expanduser().resolve()), FUNCTION_NAME)
    if not callable(function):
        raise ValueError(f"{FUNCTION_NAME} in {spec!r} is a {type(function).__name__}; make it a function")
    return RewardFunction(f"{FUNCTION_NAME} in {spec!r}", function)


def _over_batch(scorer: Scorer) -> Callable[..., dict[str, Any]]:
    def score_all(
        _queries: list[str], _prompts: list[str], labels: list[Any], responses: list[str]
    ) -> dict[str, list[float]]:
        return {"rewards": [scorer(response, label) for response, label in zip(responses, labels, strict=True)]}

    return score_all


def _response_of(query: str, prompt: str) -> str:
    if not query.startswith(prompt):
        raise ValueError(f"the query {query!r} does not begin with its prompt {prompt!r}; pass responses=... as well")
    return query[len(prompt) :]


def _accepted_keywords(function: Callable[..., Any]) -> set[str] | None:
    """Name the keyword arguments that a function takes; None when it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def _load_file(path: Path) -> ModuleType:
    # The name is made from the path: two files called reward.py are two modules.
    name = f"troupe_reward_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look their module up here while the file still runs.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        error.add_note(f"while loading the reward file {str(path)!r}")
        raise
    return module


def _top_level_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def _checked(result: Any, count: int, prompts: Sequence[str], source: str) -> RewardOutput:
    if not isinstance(result, Mapping) or "rewards" not in result:
        keys = f" with the keys {sorted(map(str, result))}" if isinstance(result, Mapping) else ""
        raise ValueError(
            f"{source} returned a {type(result).__name__}{keys}; return a dict with 'rewards' (one number per query) "
            "and, if you like, 'scores' and 'extra_logs'"
        )
    reward_B = _column(result["rewards"], count, f"{source}: 'rewards'")
    scores = result.get("scores")
    score_B = reward_B.clone() if scores is None else _column(scores, count, f"{source}: 'scores'")
    for name, column_B in (("rewards", reward_B), ("scores", score_B)):
        for index, value in enumerate(column_B.tolist()):
            if not math.isfinite(value):
                raise ValueError(f"{source}: '{name}' is {value} for query {index} (prompt {prompts[index]!r})")
    logs = {
        str(name): _column(value, count, f"{source}: extra_logs[{name!r}]", repeat=True)
        for name, value in (result.get("extra_logs") or {}).items()
    }
    return RewardOutput(reward_B=reward_B, score_B=score_B, logs=logs)


def _column(value: Any, count: int, what: str, *, repeat: bool = False) -> Tensor:
    """Turn numbers in any shape that holds B of them into [B] float32; with `repeat`, one number is enough."""
    import torch

    if isinstance(value, (list, tuple)):
        value = [item.item() if hasattr(item, "item") else item for item in value]
    try:
        tensor = torch.as_tensor(value).detach().to("cpu", torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} must be numbers, found a {type(value).__name__} ({error})") from error
    if repeat and tensor.numel() == 1:
        return tensor.reshape(1).repeat(count)
    # [B, 1] is a common way to write B numbers; [2, B/2] is a mistake.
    if tensor.shape not in ((count,), (count, 1)):
        raise ValueError(f"{what} has the shape {tuple(tensor.shape)}; give one number for each of the {count} queries")
    return tensor.reshape(count).clone()
