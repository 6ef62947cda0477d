"""Shipped environments: `agent.func_path=env:<name>` runs the file of that name here, or that of a plug-in."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from agents.environment import AgentInstanceBase


class TextEnvironment(AgentInstanceBase):
    """Base class of environments whose feedback is chat messages, or text for a model without a chat template."""

    chat: ClassVar[bool] = True
    """True for chat messages, False for text. Set by a subclass."""

    def as_feedback(self, text: str) -> str | list[dict[str, str]]:
        """Return a text as feedback: a user message, or the text itself if `chat` is False."""
        return [{"role": "user", "content": text}] if self.chat else text


def read_label(label: Any, needed: str, example: str) -> dict[str, Any]:
    """Parse a label that is a JSON object, or the text of one.

    Raises:
        ValueError: the label is not a JSON object with the field `needed`.
    """
    try:
        fields = json.loads(label) if isinstance(label, str) else label
    except ValueError:
        fields = None
    if not isinstance(fields, Mapping) or needed not in fields:
        raise ValueError(
            f"the label {str(label)[:200]!r} is not a JSON object with {needed!r}; set data.label_key to a field such "
            f"as {example}"
        )
    return dict(fields)


def library_of_games(name: str) -> ModuleType:
    """Import a library of the extra `games`. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(
            f"env:{name} needs {name}, which is not installed; run: bash scripts/setup.sh recipes games"
        ) from error
