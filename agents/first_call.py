"""Trial of an agent before a run starts: the first call of an episode, with rows of the data.

plugins/reward_trial does the same for rewards. The trial finds a label that the environment cannot read, a missing
column, and a prompt to which the chat template was already applied, before any model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from agents.options import AgentOptions
from agents.rendering import first_tokens
from agents.trial import AgentTrial, Opening, UntriedError
from components.data.row_kinds import rows_by_kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.data.prompts import PromptSource

LIMIT_S = 2.0
"""Seconds that the first call of an episode may take in a trial."""


class PromptOptions(Protocol):
    """Dataclass of the options that determine how rows are converted to prompts. It has a field `overlong`."""

    apply_chat_template: bool
    input_template: str | None

    def source(
        self, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, seed: int, shuffle: bool = True
    ) -> PromptSource:
        """Return a source of the prompts of these rows."""
        ...


def try_agent(
    agent: AgentOptions,
    data: PromptOptions,
    rows: Mapping[str, list[dict[str, Any]]],
    load_tokenizer: Callable[[], PreTrainedTokenizerBase] | None,
) -> list[str]:
    """Make the first call of an episode with the first row of each kind: `reset` of an environment, or the reward
    function of a single-turn agent. If a call fails, further rows of that kind are tried, because a few episodes may
    fail.

    Args:
        agent: options of the agent.
        data: options of the prompts.
        rows: rows of the data by the name of their part in messages. Parts without rows are left out.
        load_tokenizer: function that loads the policy's tokenizer. None for a plan that is made without the model.

    Returns:
        Notes for the user: calls that were not tried, with the reason, and rows whose episodes will fail.

    Raises:
        ValueError: the agent cannot be loaded, or an episode cannot begin. The message names the row and the reason.
    """
    option = f"agent.func_path={agent.func_path}"
    prompts = _Prompts(data, load_tokenizer)
    notes = list[str]()
    try:
        with AgentTrial(str(agent.func_path), agent.arguments) as trial:
            # An executor with its own `execute` has no call that is possible without the policy.
            if not trial.first_call:
                return [_untried(option, data)]
            for part, some in rows.items():
                for numbers in rows_by_kind(some):
                    notes += _try_kind(trial, prompts, some, numbers, f"{option}, tried with row {{}} of {part}: ")
    except ValueError as error:
        # An agent that cannot be loaded; the errors of rows name the option already.
        if not str(error).startswith(option):
            raise ValueError(f"{option}: {error}") from error
        raise
    except UntriedError as error:
        notes.append(f"{option}: the trial of its first call before the start has no result: {error}")
    return notes


def _try_kind(
    trial: AgentTrial, prompts: _Prompts, rows: list[dict[str, Any]], numbers: list[int], where: str
) -> list[str]:
    """Try rows until one succeeds, and return a note for each row that failed. Raises ValueError if all rows fail."""
    errors = list[ValueError]()
    for number in numbers:
        row = rows[number]
        try:
            text = prompts.text(row)
            prompts.check_opening(trial.try_row(text, row, LIMIT_S), text)
        except ValueError as error:
            named = ValueError(f"{where.format(number)}{error}")
            for note in getattr(error, "__notes__", ()):
                named.add_note(note)
            errors.append(named)
            continue
        # Failures of other rows of the kind are only notes, because a share of the episodes may fail in a run.
        return [f"{error}; episodes of such rows are errors (agent.max_failed_share)" for error in errors]
    raise errors[0]


def _untried(option: str, data: PromptOptions) -> str:
    note = f"{option} is not tried before the start: its episodes begin with the policy"
    if data.apply_chat_template:
        note += (
            "; prompts have been through the chat template (data.apply_chat_template=true), and a chat message that "
            "holds one is refused: set it to false where the agent writes messages"
        )
    return note


class _Prompts:
    """Prompts and first observations as the policy reads them. The tokenizer is loaded when it is first needed."""

    def __init__(self, data: PromptOptions, load_tokenizer: Callable[[], PreTrainedTokenizerBase] | None) -> None:
        # The length of prompts is checked elsewhere. Here a long prompt is cut, so that every row can be tried.
        self._data: PromptOptions = replace(cast(Any, data), overlong="right")
        self._load_tokenizer = load_tokenizer
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def text(self, row: dict[str, Any]) -> str:
        """Return the text of a row's prompt."""
        is_plain = isinstance(row["input"], str) and not self._data.apply_chat_template
        if is_plain and self._data.input_template is None:
            return str(row["input"])
        return self._data.source([row], self._loaded(), 0, shuffle=False).first()[0]

    def check_opening(self, opening: Opening | None, prompt: str) -> None:
        """Raise ValueError if no sequence can begin with the return value of `reset`."""
        if opening is None or opening[0] == prompt:
            return
        from components.data.text import TextEncoder

        observation, tools = opening
        first_tokens(TextEncoder(self._loaded()), observation, prompt, tools)

    def _loaded(self) -> PreTrainedTokenizerBase:
        if self._load_tokenizer is None:
            raise UntriedError("the policy's tokenizer is not on this machine")
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer
