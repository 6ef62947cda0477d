"""What an environment may return, read from whatever kind of numbers it is written in. Nothing here needs torch."""

from __future__ import annotations

import dataclasses
import functools
import logging
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from components.data.cells import text_or_messages, without_surrogates
from components.generate.config import EVALUATION_STEP
from components.rewards.base import read_columns

if TYPE_CHECKING:
    from components.generate.config import SamplingConfig

STEP_KEYS = ("rewards", "environment_feedback", "done")
"""What every step has to return."""
SAMPLING_KEYS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_tokens": "max_new_tokens"}
"""The numbers of `sampling_params`, and what they are called in a SamplingConfig."""

_log = logging.getLogger(__name__)

Observation = str | Sequence[Mapping[str, Any]]
"""Text, or chat messages: each with `role` and `content`."""


class SamplingParams(dict[str, Any]):
    """How a turn is drawn; OpenRLHF's agents read and write attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"no {name!r} in sampling_params; it has {', '.join(self)}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


@dataclass(frozen=True)
class StepResult:
    """What one step gave."""

    reward: float
    score: float | None
    """None: the sum of the rewards so far."""
    feedback: Observation
    done: bool
    logs: dict[str, float]
    sampling_params: Any = field(default=None, compare=False, repr=False)


def read_reset(result: Any) -> tuple[Observation, Sequence[Mapping[str, Any]]]:
    """Read what `reset` returned, and the tools, if it has some; ValueError says what is wrong with it."""
    if not isinstance(result, Mapping) or "observation" not in result:
        raise ValueError(
            f'reset returned {_shown(result)}; return {{"observation": the text that the policy reads first}}'
        )
    tools = result.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"reset: 'tools' is {_shown(tools)}; return a list of JSON schemas of functions")
    return _read_observation(result["observation"], "reset", "observation"), without_surrogates(tools)


def read_step(result: Any, where: str) -> StepResult:
    """Read what a `step` returned, which is called `where`; ValueError says what is wrong with it."""
    if not isinstance(result, Mapping) or any(key not in result for key in STEP_KEYS):
        raise ValueError(
            f"{where} returned {_shown(result)}; return a dict with {', '.join(STEP_KEYS)} in it, and, if you "
            "like, scores, sampling_params, extra_logs"
        )
    score = result.get("scores")
    columns = {"rewards": [result["rewards"]], "extra_logs": result.get("extra_logs")}
    try:
        read = read_columns(columns if score is None else columns | {"scores": [score]}, 1)
    except ValueError as error:
        raise ValueError(
            f"{where}: give one number each, as a float or a tensor with one element; read as a batch: {error}"
        ) from error
    done = result["done"]
    # NumPy's and torch's truth values are none of Python's, but hold one.
    done = done.item() if hasattr(done, "item") else done
    if not isinstance(done, bool):
        raise ValueError(f"{where}: 'done' is {_shown(done)}; return True or False")
    feedback = result["environment_feedback"]
    # Nobody reads what is said after the end.
    feedback = "" if feedback is None and done else _read_observation(feedback, where, STEP_KEYS[1])
    logs = {name: values[0] for name, values in read.logs.items()}
    params = result.get("sampling_params")
    return StepResult(read.rewards[0], None if score is None else read.scores[0], feedback, done, logs, params)


def sampling_params(sampling: SamplingConfig, stop: Sequence[str]) -> SamplingParams:
    """What an environment is given of how a turn was drawn."""
    drawn = {key: getattr(sampling, name) for key, name in SAMPLING_KEYS.items()}
    return SamplingParams(drawn, stop=list(stop))


def read_sampling(given: Any, run: SamplingConfig) -> tuple[SamplingConfig, list[str]]:
    """Read what a step wants of the next turn, a dict or an object with attributes.

    The first that draws otherwise than the run is warned of: log-probabilities are trained at the run's numbers.

    Args:
        given: what it returned; what it does not name, or names as None, is as in `run`.
        run: how the run draws. `max_tokens` can be lowered, not raised.

    Returns:
        How to draw, and the texts that end the turn.

    Raises:
        ValueError: a name that is unknown, or a value that cannot be.
    """
    names = [*SAMPLING_KEYS, "stop"]
    fields = given if isinstance(given, Mapping) else {name: getattr(given, name, None) for name in names}
    unknown = [name for name in fields if name not in names]
    if unknown or not (isinstance(given, Mapping) or any(hasattr(given, name) for name in names)):
        what = f"holds {unknown[0]!r}" if unknown else f"is {_shown(given)}"
        raise ValueError(f"sampling_params {what}; it may have {', '.join(names)}")
    values = {name: value for name, value in fields.items() if value is not None}
    stop = values.pop("stop", [])
    stop = [stop] if isinstance(stop, str) else list(stop)
    wrong = [value for value in values.values() if not isinstance(value, numbers.Real)]
    if wrong or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"sampling_params hold {(wrong or [stop])[0]!r}; give numbers, and for stop texts")
    if values.get("top_k") == -1:  # vLLM's word for all
        values["top_k"] = 0
    try:
        values |= {name: operator.index(values[name]) for name in ("top_k", "max_tokens") if name in values}
    except TypeError as error:
        raise ValueError(f"sampling_params hold a top_k or max_tokens that is not whole: {error}") from error
    if "max_tokens" in values:
        values["max_tokens"] = min(values["max_tokens"], run.max_new_tokens)
    for name in ("temperature", "top_p", "top_k"):
        if values.get(name, getattr(run, name)) != getattr(run, name) and run.step != EVALUATION_STEP:
            _warn_changed()
    return dataclasses.replace(run, **{SAMPLING_KEYS[name]: value for name, value in values.items()}), stop


@functools.cache
def _warn_changed() -> None:
    _log.warning(
        "an environment changes temperature, top_p or top_k of a turn; its log-probabilities are trained at the "
        "run's, and so differ from those that it was drawn with"
    )


def _read_observation(value: Any, where: str, key: str) -> Observation:
    if not isinstance(value, str | list):
        raise ValueError(
            f"{where}: {key!r} is {_shown(value)}; return text, or a list of messages with role and content"
        )
    value = without_surrogates(value)
    mend = "return text, or a list of messages with role and content"
    return value if value == [] else text_or_messages(value, f"{where}: {key!r}", mend)


def _shown(value: Any) -> str:
    keys = f" with the keys {sorted(map(str, value))}" if isinstance(value, Mapping) else f" ({value!r:.60})"
    return f"a {type(value).__name__}{keys}"
