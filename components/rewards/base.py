"""Reward sources: a scorer by name, a function in a Python file, servers, or a sum of these, with one interface.

Shape suffix: B sequences. torch is imported with the first rewards, so that a plan check can call `check_reward`
without it.
"""

from __future__ import annotations

import math
import numbers
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from components.ranges import Checked, Count, Seconds, Share
from components.registry import load, require
from components.rewards.errors import WrongCountError
from components.rewards.scorers import get_scorer
from components.rewards.servers import check_servers, is_server

if TYPE_CHECKING:
    from torch import Tensor


FUNCTIONS = "reward functions"
"""Kind of plug-in that provides users' reward functions."""
SUM = "reward sum"
"""Kind of plug-in that provides weighted sums of rewards."""

READ_COLUMNS = ("tokens", "prompt_length", "prompt", "label", "datasource", "extra_info")
"""Columns of a batch of rollouts that reward code reads. `extra_info` holds all further columns of the data. A batch
that is sent to another process for its rewards needs those of these columns that it has."""

FILE = re.compile(r"(?P<path>.+\.py)(:(?P<name>[^\W\d]\w*))?")
"""A reward file, with the name of a function or without."""

FLOAT32_MAX = 3.4028234663852886e38
"""Largest finite number of float32."""
MOST_NESTED = 16
"""Maximum depth of nested lists that are read. A server may send hundreds of levels."""

_WEIGHT = re.compile(r"(?:^|\s\+\s)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*\*")
"""Weight at the start of a part of a weighted sum."""


@dataclass(frozen=True, kw_only=True)
class RewardSettings(Checked):
    """Settings of the processes that run reward code, and of requests to reward servers."""

    workers: Count = 1
    """Number of processes that run reward code."""
    timeout_s: Seconds = 60.0
    """Timeout in seconds of reward code for one response, or for one chunk of responses. Its process is then killed."""
    max_failed_share: Share = 0.1
    """Maximum share of a batch's responses, from 0 to 1, that may fail in reward code. Above it the run stops."""
    url_timeout_s: Seconds = 180.0
    """Timeout of one HTTP request in seconds."""
    url_tries: Count = 5
    """Maximum number of tries of a request before the run stops."""
    url_batch_size: Count = 64
    """Number of responses in one HTTP request."""


@dataclass(frozen=True)
class RewardOutput:
    """Rewards of a batch, in its order."""

    reward_B: Tensor
    """[B] float32 reward that the policy is trained on."""
    score_B: Tensor
    """[B] float32 quality of the response from 0 to 1, for filters and evaluation. The reward, if the code returns no
    score."""
    logs: dict[str, Tensor]
    """Further numbers to log, each [B] float32. A single number for several sequences is repeated for each."""
    failures: dict[int, str] = field(default_factory=dict)
    """Index in the batch -> one-line reason for a missing reward. The reward and score are 0, and the logs NaN."""
    texts: dict[str, list[str | None]] = field(default_factory=dict)
    """Further texts to log, one for each response or None."""
    absent: list[int] = field(default_factory=list)
    """Indices for which a part of a sum returned None as reward. Their reward and score are 0."""


class Responses(NamedTuple):
    """Inputs of a reward for B responses; see `RewardSource.__call__`."""

    queries: Sequence[str]
    """Prompt and response as one text."""
    prompts: Sequence[str]
    """Text of each prompt."""
    labels: Sequence[Any]
    """Label of each response, as in the data."""
    responses: Sequence[str] | None
    """Text of each response, or None."""
    rows: Sequence[Mapping[str, Any]]
    """Further values of each response; see `by_names` of plugins/reward_functions."""


class RewardSource(ABC):
    """Interface of rewards. A source may hold processes or connections until it is closed. It is a context manager."""

    source: str
    """Name of the source in error messages."""
    reads_queries: bool = True
    """False if the source reads no queries, so that callers may pass empty texts instead of decoding them."""

    def __call__(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        *,
        responses: Sequence[str] | None = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> RewardOutput:
        """Compute the rewards of B sequences.

        Args:
            queries: prompt and response as one text, with special tokens as decoded by the caller.
            prompts: texts of the prompts.
            labels: labels as in the data.
            responses: texts of the responses without special tokens, which the built-in scorers read. By default the
                part of each query after its prompt.
            rows: further values of each response, see `by_names` of plugins/reward_functions. Only functions of files
                read them.

        Raises:
            ValueError: a list has another length than `queries`.
            RewardError: too many responses have no reward.
        """
        count = len(queries)
        if rows is None:
            rows = [{}] * count
        samples = Responses(queries, prompts, labels, responses, rows)
        for name, column in samples._asdict().items():
            if column is not None and len(column) != count:
                raise ValueError(f"{self.source}: {count} queries came with {len(column)} {name}; give one for each")
        return self.reward(samples)

    @abstractmethod
    def reward(self, samples: Responses) -> RewardOutput:
        """Compute the rewards of B responses."""

    @abstractmethod
    def close(self) -> None:
        """End the processes and connections of the source."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_reward(spec: str) -> None:
    """Check that `open_reward` can open a reward, without running the user's file or calling a server.

    Raises:
        ValueError: it cannot.
    """
    parts = reward_parts(spec)
    if parts != [(1.0, spec)]:
        # Checked here, because the sum is opened only after the models are loaded.
        require(SUM, "weighted", f"reward.source={spec}")
    for _, part in parts:
        if is_server(part):
            check_servers(part)
        elif is_reward_file(part):
            load(FUNCTIONS, "check", f"reward.source={part}")(part)
        else:
            get_scorer(part)


def is_reward_file(part: str) -> bool:
    """Return True if a part of a reward is a Python file, with the name of a function or without."""
    return FILE.fullmatch(part) is not None


def reward_parts(spec: str) -> list[tuple[float, str]]:
    """Split a weighted sum into weights and parts. A spec without weights is one part of weight 1.

    The separator is ` + ` followed by a number and `*`. ` + ` alone may be part of the name of a file.

    Raises:
        ValueError: a part has no weight, or one that is not above 0.
    """
    weights = list(_WEIGHT.finditer(spec))
    if not weights and (" + " not in spec or Path(spec).expanduser().is_file()):
        return [(1.0, spec)]
    # A part ends where the next weight begins.
    ends = [*(match.start() for match in weights[1:]), len(spec)]
    parts = [(float(match[1]), spec[match.end() : end].strip()) for match, end in zip(weights, ends)]
    begins_with_weight = bool(weights) and not spec[: weights[0].start()].strip()
    if not begins_with_weight or not all(0 < weight < math.inf and part for weight, part in parts):
        raise ValueError(
            f"the reward {spec!r} is not a sum: give each part a weight above 0, as in 0.7*gsm8k + 0.3*style.py (a "
            "penalty is a part whose rewards are below 0)"
        )
    return parts


# The rest of this module is shared by reward code and reward servers, which accept the same results.


@dataclass(frozen=True)
class Columns:
    """Result of one call as plain numbers, one for each response. It can be sent to a process without torch."""

    rewards: list[float]
    """Reward of each response."""
    scores: list[float]
    """Score of each response."""
    logs: dict[str, list[float]]
    """Further numbers to log by name."""
    texts: dict[str, list[str | None]] = field(default_factory=dict)
    """Further texts to log by name."""
    absent: list[int] = field(default_factory=list)
    """Indices of responses without a reward (None), which is not a failure. Their reward and score are 0."""
    failures: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Index -> reason and traceback of a response whose reward failed by itself. Its reward and score are 0."""


def read_columns(result: Any, count: int) -> Columns:
    """Read the result of a reward function, or the reply of a server, for `count` responses.

    Numbers may be lists, tuples, tensors or arrays of shape [B] or [B, 1].

    Raises:
        WrongCountError: numbers have another shape.
        ValueError: the result is not understood, or a number is not finite.
    """
    if not isinstance(result, Mapping) or "rewards" not in result:
        keys = ""
        if isinstance(result, Mapping):
            keys = f" with the keys {sorted(map(str, result))}"
        raise ValueError(
            f"returned a {type(result).__name__}{keys}; return one number for each response, in a list or as 'rewards' "
            "of a dict, which may have 'scores' and 'extra_logs' too"
        )
    rewards = _numbers(result["rewards"], count, "'rewards'")
    scores = rewards
    if result.get("scores") is not None:
        scores = _numbers(result["scores"], count, "'scores'")
    for name, column in (("rewards", rewards), ("scores", scores)):
        for value in column:
            # `not <=` also rejects NaN. A larger number would become infinite in float32.
            if not abs(value) <= FLOAT32_MAX:
                raise ValueError(f"'{name}' holds {value}; return finite numbers")
    extra_logs = result.get("extra_logs")
    if not isinstance(extra_logs, Mapping | None):
        raise ValueError(f"'extra_logs' is a {type(extra_logs).__name__}; return a dict of names and numbers")
    # A number to log may apply to the whole batch, unlike a reward.
    logs: dict[str, list[float]] = {}
    for name, values in (extra_logs or {}).items():
        logs[str(name)] = _numbers(values, count, f"extra_logs[{name!r}]", repeat=True)
    return Columns(rewards, scores, logs)


def join_columns(
    count: int, parts: Sequence[tuple[Sequence[int], Columns]], failures: Mapping[int, str]
) -> RewardOutput:
    """Join the columns of all calls to the output of a batch.

    A number to log that is missing for some responses is NaN there.

    Args:
        count: number of responses of the batch.
        parts: for each call, the indices of its responses in the batch, and its columns.
        failures: index -> reason of responses without a reward.
    """
    import torch

    names = {name for _, columns in parts for name in columns.logs}
    rewards = [0.0] * count
    scores = [0.0] * count
    # NaN for responses without a number: 0 would change the mean of the metric.
    logs = {name: [math.nan] * count for name in sorted(names)}
    texts: dict[str, list[str | None]] = {}
    for indices, columns in parts:
        pairs: list[tuple[list[Any], list[Any]]] = [(rewards, columns.rewards), (scores, columns.scores)]
        pairs += [(logs[name], values) for name, values in columns.logs.items()]
        pairs += [(texts.setdefault(name, [None] * count), values) for name, values in columns.texts.items()]
        for column, values in pairs:
            for index, value in zip(indices, values, strict=True):
                column[index] = value
    return RewardOutput(
        reward_B=torch.tensor(rewards, dtype=torch.float32),
        score_B=torch.tensor(scores, dtype=torch.float32),
        logs={name: torch.tensor(values, dtype=torch.float32) for name, values in logs.items()},
        failures=dict(sorted(failures.items())),
        texts=dict(sorted(texts.items())),
        absent=sorted(indices[i] for indices, columns in parts for i in columns.absent),
    )


def _numbers(value: Any, count: int, name: str, *, repeat: bool = False) -> list[float]:
    """Read one number for each response. With `repeat`, a single number applies to all responses.

    Raises:
        WrongCountError: there are more or fewer numbers than responses.
        ValueError: a value is not a number. The message begins with `name`.
    """
    if type(value) is list and len(value) == count and all(type(item) is float for item in value):
        return value  # the common case, without a copy
    lists = _listed(value)
    flat = _flat(lists)
    for item in flat:
        if not isinstance(item, numbers.Real):
            raise ValueError(f"{name} must be numbers, found a {type(item).__name__} among them")
    # [B, 1] is a common shape of B numbers, but [2, B/2] is a mistake.
    if repeat and len(flat) == 1:
        flat *= count
    elif _shape(lists) not in ((count,), (count, 1)) or len(flat) != count:
        shape = _shape(lists)
        raise WrongCountError(f"{name} holds {len(flat)} numbers of shape {shape} for {count} queries; give one each")
    return [_number(item) for item in flat]


def _listed(value: Any, depth: int = 0) -> Any:
    """Convert tensors, arrays and tuples to lists at any depth, without importing their libraries.

    Raises:
        ValueError: lists are nested deeper than any array of numbers.
    """
    if depth > MOST_NESTED:
        raise ValueError(f"lists are nested more than {MOST_NESTED} deep; return one list of numbers")
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_listed(item, depth + 1) for item in value]
    return value


def _flat(value: Any) -> list[Any]:
    if not isinstance(value, list):
        return [value]
    return [item for part in value for item in _flat(part)]


def _number(value: numbers.Real) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer or fraction beyond float; the caller rejects infinity
        return math.inf


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        return ()
    return (len(value), *_shape((value or [None])[0]))
