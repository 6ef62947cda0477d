"""Rewards: a scorer by name, a function in a Python file, servers, or a sum of them, opened and called the same way.

B sequences. Nothing here imports torch before the first rewards are there, so that a plan check can call
`check_reward`.
"""

from __future__ import annotations

import ast
import math
import numbers
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, cast

from components.ranges import Checked, Count, Seconds, Share
from components.rewards.errors import WrongCountError
from components.rewards.scorers import get_scorer
from components.rewards.servers import check_servers, is_server

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

FUNCTION_NAME = "reward_func"
FUNCTION_NAMES = (FUNCTION_NAME, "compute_score")
"""What a reward file calls its function, where its name does not follow the path, as in `style.py:brevity`."""

READ_COLUMNS = ("tokens", "prompt_length", "prompt", "label", "datasource", "extra_info")
"""Columns of a batch of rollouts that reward code reads, `extra_info` with all further columns of the data. A batch
that is sent to another process for its rewards needs those of them that it has."""

FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)
_FILE = re.compile(r"(?P<path>.+\.py)(:(?P<name>[^\W\d]\w*))?")

FLOAT32_MAX = 3.4028234663852886e38
MOST_NESTED = 16
"""Levels of nested lists that are read; a server may send hundreds."""

_WEIGHT = re.compile(r"(?:^|\s\+\s)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*\*")


@dataclass(frozen=True, kw_only=True)
class RewardSettings(Checked):
    """How reward code is run, and how reward servers are asked."""

    workers: Count = 1
    """Processes that run reward code."""
    timeout_s: Seconds = 60.0
    """Seconds that reward code may take for one response, or for one chunk of them, before its process is killed."""
    max_failed_share: Share = 0.1
    """Share of a batch's responses, from 0 to 1, that may fail in reward code; above it the run stops."""
    url_timeout_s: Seconds = 180.0
    """Seconds that one HTTP request may take."""
    url_tries: Count = 5
    """How often a request is sent before the run stops."""
    url_batch_size: Count = 64
    """Responses in one HTTP request."""


@dataclass(frozen=True)
class RewardOutput:
    """The rewards of one batch, in its order."""

    reward_B: Tensor
    """[B] float32: what the policy is trained on."""
    score_B: Tensor
    """[B] float32: how good the response is, from 0 to 1; filters and evaluation read it. The reward, unless given."""
    logs: dict[str, Tensor]
    """Further numbers to log, each [B] float32; a single number was repeated for every sequence it was given for."""
    failures: dict[int, str] = field(default_factory=dict)
    """Why there is no reward, in one line, by place in the batch; reward and score are 0 there, and logs NaN."""
    texts: dict[str, list[str | None]] = field(default_factory=dict)
    """Other texts about each."""
    absent: list[int] = field(default_factory=list)
    """Places for which a part of a sum has no reward (None); it stands as 0 above."""


class Responses(NamedTuple):
    """What is known of B responses; see `RewardSource`."""

    queries: Sequence[str]
    prompts: Sequence[str]
    labels: Sequence[Any]
    responses: Sequence[str] | None
    rows: Sequence[Mapping[str, Any]]


class RewardSource(ABC):
    """Whatever rewards a batch. It may hold processes or connections until it is closed, as at the end of a `with`."""

    source: str
    """What errors call it."""

    def __call__(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        *,
        responses: Sequence[str] | None = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> RewardOutput:
        """Reward B sequences.

        Args:
            queries: prompt and response as one text, special tokens as the caller decoded them.
            prompts: the prompts' text.
            labels: as the data has them.
            responses: the responses alone, without special tokens. The built-in scorers read them; left out, a
                response is what follows the prompt in its query.
            rows: what else is known of each, see `by_names` of functions.py; only functions of files read it.

        Raises:
            ValueError: there are more or fewer of some than queries.
        """
        count = len(queries)
        given = Responses(queries, prompts, labels, responses, [{}] * count if rows is None else rows)
        for name, column in given._asdict().items():
            if column is not None and len(column) != count:
                raise ValueError(f"{self.source}: {count} queries came with {len(column)} {name}; give one for each")
        return self.reward(given)

    @abstractmethod
    def reward(self, given: Responses) -> RewardOutput:
        """Reward all of them."""

    @abstractmethod
    def close(self) -> None:
        """End what was started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_reward(spec: str) -> None:
    """Refuse what `open_reward` could not open, without running the user's file or asking a server."""
    for _, part in reward_parts(spec):
        if is_server(part):
            check_servers(part)
        elif is_reward_file(part):
            reward_function(part)
        else:
            get_scorer(part)


def is_reward_file(part: str) -> bool:
    """Whether a part of a reward is a Python file, maybe with the name of a function of it."""
    return _FILE.fullmatch(part) is not None


def reward_function(part: str) -> tuple[Path, str]:
    """The file of a part, and the name of its function: the one that is given, else one of FUNCTION_NAMES, else the
    only one that the file defines. The file is not run.

    Raises:
        ValueError: it is not there, no valid Python, or does not define it.
    """
    found = _FILE.fullmatch(part)
    assert found is not None, part
    path, name = found["path"], found["name"]
    usage = "reward_func(queries, prompts, labels, **kwargs), or give the name of a function: FILE.py:NAME"
    if name is not None:
        check_defines(path, "reward file", [name], f"{name}, which {part!r} names")
        return Path(path).expanduser().resolve(), name
    tree = parse_file(path, "reward file")
    public = [node.name for node in tree.body if isinstance(node, FUNCTION_NODES) and node.name[0] != "_"]
    wanted = FUNCTION_NAMES if len(public) != 1 or names_in(tree).intersection(FUNCTION_NAMES) else public
    defined = names_in(check_defines(path, "reward file", wanted, usage))
    return Path(path).expanduser().resolve(), next(name for name in wanted if name in defined)


def reward_parts(spec: str) -> list[tuple[float, str]]:
    """The parts of a weighted sum with their weights, or all of `spec` with a weight of 1.

    Only ` + ` before a number and `*` parts it: both may be in the name of a file, and neither in a URL.

    Raises:
        ValueError: a part has no weight, or one that is not above 0.
    """
    found = list(_WEIGHT.finditer(spec))
    if not found and (" + " not in spec or Path(spec).expanduser().is_file()):
        return [(1.0, spec)]
    ends = [*(match.start() for match in found[1:]), len(spec)]
    parts = [(float(match[1]), spec[match.end() : end].strip()) for match, end in zip(found, ends)]
    whole = bool(found) and not spec[: found[0].start()].strip()
    if not whole or not all(0 < weight < math.inf and part for weight, part in parts):
        raise ValueError(
            f"the reward {spec!r} is no sum: give each part a weight above 0, as in 0.7*gsm8k + 0.3*style.py (a "
            "penalty is a part whose rewards are below 0)"
        )
    return parts


def parse_file(spec: str, what: str) -> ast.Module:
    """Parse a user's file, which errors call `what`, without running it.

    Raises:
        ValueError: it is not there, or no valid Python.
    """
    path = Path(spec).expanduser()
    if not path.is_file():
        raise ValueError(f"{what} {spec!r} does not exist (looked in {Path.cwd()}); give the path of a .py file")
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{what} {spec!r} is not valid Python: {error}") from error


def check_defines(spec: str, what: str, names: Collection[str], usage: str) -> ast.Module:
    """Parse a user's file, and see that it defines one of these names; `usage` says what errors ask for.

    Raises:
        ValueError: it is not there, no valid Python, or defines none of these.
    """
    tree = parse_file(spec, what)
    found = names_in(tree)
    if not found.intersection(names):
        raise ValueError(f"{what} {spec!r} does not define {usage}; found: {', '.join(sorted(found)) or 'nothing'}")
    return tree


def names_in(tree: ast.Module) -> set[str]:
    """What a file defines at its top level, as far as can be seen."""
    found = set[str]()
    for node in tree.body:
        if isinstance(node, (*FUNCTION_NODES, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(alias.asname or alias.name for alias in node.names)
    return found


# What is below is shared by reward code and reward servers: the same columns go in, the same responses are accepted.


@dataclass(frozen=True)
class Columns:
    """What one call gave, as plain numbers, one for each of its responses; it crosses processes without torch."""

    rewards: list[float]
    scores: list[float]
    logs: dict[str, list[float]]
    texts: dict[str, list[str | None]] = field(default_factory=dict)
    absent: list[int] = field(default_factory=list)
    """For which of them there is no reward, without anything having failed; it stands as 0 above."""
    failures: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Reason and traceback of each response whose reward failed alone; it stands as 0 above."""


def read_columns(result: Any, count: int) -> Columns:
    """Read what a reward function returned, or a server sent, for `count` responses; ValueError names what is wrong.

    Numbers may come as lists, tuples, tensors or arrays, of B or of [B, 1]; WrongCountError for other shapes.
    """
    if not isinstance(result, Mapping) or "rewards" not in result:
        keys = f" with the keys {sorted(map(str, result))}" if isinstance(result, Mapping) else ""
        raise ValueError(
            f"returned a {type(result).__name__}{keys}; return one number for each response, in a list or as 'rewards' "
            "of a dict, which may have 'scores' and 'extra_logs' too"
        )
    rewards = _numbers(result["rewards"], count, "'rewards'")
    given = result.get("scores")
    scores = rewards if given is None else _numbers(given, count, "'scores'")
    for name, column in (("rewards", rewards), ("scores", scores)):
        for value in column:
            # Written so that NaN is caught too; what float32 cannot hold would become infinite.
            if not abs(value) <= FLOAT32_MAX:
                raise ValueError(f"'{name}' holds {value}; return finite numbers")
    extra = result.get("extra_logs")
    if not isinstance(extra, Mapping | None):
        raise ValueError(f"'extra_logs' is a {type(extra).__name__}; return a dict of names and numbers")
    given = extra or {}
    logs = {str(name): _numbers(given[name], count, f"extra_logs[{name!r}]", repeat=True) for name in given}
    return Columns(rewards, scores, logs)


def join_columns(
    count: int, parts: Sequence[tuple[Sequence[int], Columns]], failures: Mapping[int, str]
) -> RewardOutput:
    """Put the columns of all calls together: each part names which responses of the batch it is about.

    A number to log that is not there for all of them is NaN for those without it.
    """
    import torch

    names = {name for _, columns in parts for name in columns.logs}
    rewards, scores = [0.0] * count, [0.0] * count
    logs = {name: [math.nan] * count for name in sorted(names)}
    texts: dict[str, list[str | None]] = {}
    for places, columns in parts:
        pairs: list[tuple[list[Any], list[Any]]] = [(rewards, columns.rewards), (scores, columns.scores)]
        pairs += [(logs[name], values) for name, values in columns.logs.items()]
        pairs += [(texts.setdefault(name, [None] * count), values) for name, values in columns.texts.items()]
        for column, values in pairs:
            for place, value in zip(places, values, strict=True):
                column[place] = value
    return RewardOutput(
        reward_B=torch.tensor(rewards, dtype=torch.float32),
        score_B=torch.tensor(scores, dtype=torch.float32),
        logs={name: torch.tensor(values, dtype=torch.float32) for name, values in logs.items()},
        failures=dict(sorted(failures.items())),
        texts=dict(sorted(texts.items())),
        absent=sorted(places[place] for places, columns in parts for place in columns.absent),
    )


def in_threads(works: Sequence[Callable[[], T]]) -> Iterator[T]:
    """Do all of these, each in a thread of its own, and give what they return as they end.

    The first error is raised; nobody waits for the others then.
    """
    found: SimpleQueue[tuple[T, None] | tuple[None, Exception]] = SimpleQueue()

    def do(work: Callable[[], T]) -> None:
        try:
            found.put((work(), None))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where the caller waits
            found.put((None, error))

    for work in works:
        threading.Thread(target=do, args=(work,), daemon=True).start()
    for _ in works:
        result, error = found.get()
        if error is not None:
            raise error
        yield cast(T, result)


def _numbers(value: Any, count: int, what: str, *, repeat: bool = False) -> list[float]:
    """Read a number for each response; with `repeat` also a single one for all, however it is wrapped."""
    if type(value) is list and len(value) == count and all(type(item) is float for item in value):
        return value  # as nearly always
    found = _listed(value)
    flat = _flat(found)
    for item in flat:
        if not isinstance(item, numbers.Real):
            raise ValueError(f"{what} must be numbers, found a {type(item).__name__} among them")
    # [B, 1] is a common way to write B numbers; [2, B/2] is a mistake.
    if repeat and len(flat) == 1:
        flat *= count
    elif _shape(found) not in ((count,), (count, 1)) or len(flat) != count:
        raise WrongCountError(
            f"{what} holds {len(flat)} numbers, in the shape {_shape(found)}, for {count} queries; give one for each"
        )
    return [_number(item) for item in flat]


def _listed(value: Any, depth: int = 0) -> Any:
    """Turn tensors, arrays and tuples into lists, wherever they stand, without importing what they come from.

    Raises:
        ValueError: for lists that are nested deeper than any array of numbers.
    """
    if depth > MOST_NESTED:
        raise ValueError(f"lists are nested more than {MOST_NESTED} deep; return one list of numbers")
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_listed(item, depth + 1) for item in value] if isinstance(value, (list, tuple)) else value


def _flat(value: Any) -> list[Any]:
    return [item for part in value for item in _flat(part)] if isinstance(value, list) else [value]


def _number(value: numbers.Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _shape(value: Any) -> tuple[int, ...]:
    return (len(value), *(_shape(value[0]) if value else ())) if isinstance(value, list) else ()
