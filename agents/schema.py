"""Checks and conversion of an environment's return values. This module does not import torch."""

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
"""Required keys of the return value of `step`."""
SAMPLING_KEYS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_tokens": "max_new_tokens"}
"""Key of `sampling_params` -> field of SamplingConfig."""

_log = logging.getLogger(__name__)

Observation = str | Sequence[Mapping[str, Any]]
"""Text, or chat messages: each with `role` and `content`."""


class SamplingParams(dict[str, Any]):
    """Sampling parameters of a turn, with keys also as attributes, which OpenRLHF's agents read and write."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"no {name!r} in sampling_params; it has {', '.join(self)}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


@dataclass(frozen=True)
class StepResult:
    """Checked return value of one step."""

    reward: float
    score: float | None
    """Score of the episode so far. None: the sum of the rewards so far."""
    feedback: Observation
    done: bool
    logs: dict[str, float]
    sampling_params: Any = field(default=None, compare=False, repr=False)


def read_reset(result: Any) -> tuple[Observation, Sequence[Mapping[str, Any]]]:
    """Check the return value of `reset`, and return the observation and the tools.

    Raises:
        ValueError: the value is invalid. The message names the fault.
    """
    if not isinstance(result, Mapping) or "observation" not in result:
        raise ValueError(
            f'reset returned {_shown(result)}; return {{"observation": the first text or messages of the policy}}'
        )
    tools = result.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"reset: 'tools' is {_shown(tools)}; return a list of JSON schemas of functions")
    return _read_observation(result["observation"], "reset", "observation"), without_surrogates(tools)


def read_step(result: Any, where: str) -> StepResult:
    """Check the return value of `step`. `where` names the step in messages.

    Raises:
        ValueError: the value is invalid. The message names the fault.
    """
    if not isinstance(result, Mapping) or any(key not in result for key in STEP_KEYS):
        raise ValueError(
            f"{where} returned {_shown(result)}; return a dict with {', '.join(STEP_KEYS)}, and optionally scores, "
            "sampling_params, extra_logs"
        )
    score = result.get("scores")
    columns = {"rewards": [result["rewards"]], "extra_logs": result.get("extra_logs")}
    if score is not None:
        columns["scores"] = [score]
    try:
        read = read_columns(columns, 1)
    except ValueError as error:
        raise ValueError(
            f"{where}: return one number each, as a float or a tensor with one element; read as a batch: {error}"
        ) from error
    done = result["done"]
    # Booleans of NumPy and torch are not instances of Python's bool.
    if hasattr(done, "item"):
        done = done.item()
    if not isinstance(done, bool):
        raise ValueError(f"{where}: 'done' is {_shown(done)}; return True or False")
    feedback = result["environment_feedback"]
    if feedback is None and done:
        feedback = ""  # feedback after the last turn is not used, so it may be missing
    feedback = _read_observation(feedback, where, STEP_KEYS[1])
    logs = {name: values[0] for name, values in read.logs.items()}
    params = result.get("sampling_params")
    return StepResult(read.rewards[0], None if score is None else read.scores[0], feedback, done, logs, params)


def sampling_params(sampling: SamplingConfig, stop: Sequence[str]) -> SamplingParams:
    """Return the sampling parameters of a turn in the form that an environment receives."""
    values = {key: getattr(sampling, name) for key, name in SAMPLING_KEYS.items()}
    return SamplingParams(values, stop=list(stop))


def read_sampling(requested: Any, run: SamplingConfig) -> tuple[SamplingConfig, list[str]]:
    """Check the `sampling_params` that a step has returned for the next turn.

    The first change of temperature, top_p or top_k logs a warning, because log-probabilities are trained at the run's
    values.

    Args:
        requested: a dict, or an object with attributes. Missing values and None are those of `run`.
        run: sampling parameters of the run. `max_tokens` can lower its limit, not raise it.

    Returns:
        The sampling parameters and the stop texts of the next turn.

    Raises:
        ValueError: a name is unknown, or a value is invalid.
    """
    names = [*SAMPLING_KEYS, "stop"]
    fields = {name: getattr(requested, name) for name in names if hasattr(requested, name)}
    if isinstance(requested, Mapping):
        fields = dict(requested)
    elif not fields:
        raise ValueError(f"sampling_params is {_shown(requested)}; it may have {', '.join(names)}")
    unknown = [name for name in fields if name not in names]
    if unknown:
        raise ValueError(f"sampling_params has {unknown[0]!r}; it may have {', '.join(names)}")
    values = {name: value for name, value in fields.items() if value is not None}
    stop = values.pop("stop", [])
    # A single text is OpenAI's short form of a list with one text.
    stop = [stop] if isinstance(stop, str) else list(stop)
    wrong = [value for value in values.values() if not isinstance(value, numbers.Real)]
    if wrong or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"sampling_params has {(wrong or [stop])[0]!r}; set numbers, and texts for stop")
    if values.get("top_k") == -1:  # vLLM's value for all tokens
        values["top_k"] = 0
    try:
        values |= {name: operator.index(values[name]) for name in ("top_k", "max_tokens") if name in values}
    except TypeError as error:
        raise ValueError(f"sampling_params has a top_k or max_tokens that is not an integer: {error}") from error
    if "max_tokens" in values:
        values["max_tokens"] = min(values["max_tokens"], run.max_new_tokens)
    for name in ("temperature", "top_p", "top_k"):
        # Evaluations are not trained on, so they may use other parameters.
        if values.get(name, getattr(run, name)) != getattr(run, name) and run.step != EVALUATION_STEP:
            _warn_changed()
    return dataclasses.replace(run, **{SAMPLING_KEYS[name]: value for name, value in values.items()}), stop


@functools.cache
def _warn_changed() -> None:
    _log.warning(
        "an environment changes temperature, top_p or top_k of a turn; log-probabilities are trained at the run's "
        "values, so they differ from those at which the turn was sampled"
    )


def _read_observation(value: Any, where: str, key: str) -> Observation:
    if not isinstance(value, str | list):
        raise ValueError(
            f"{where}: {key!r} is {_shown(value)}; return text, or a list of messages with role and content"
        )
    value = without_surrogates(value)
    if value == []:
        return value
    return text_or_messages(value, f"{where}: {key!r}", "return text, or a list of messages with role and content")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {sorted(map(str, value))}"
    return f"a {type(value).__name__} ({value!r:.60})"
