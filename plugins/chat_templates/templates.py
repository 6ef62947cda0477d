"""Chat templates that replace the tokenizer's, and variables that are set in a template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.net.hub import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_template(chat_template: str) -> str:
    """Return the Jinja text of a chat template.

    Args:
        chat_template: Jinja text, or the path to a file with it.

    Raises:
        ValueError: the file cannot be read, or the text is not valid Jinja.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    chat_template = template_text(chat_template)
    try:
        # Without a conversation the template is compiled, with the additional tags of chat templates, but not run.
        render_jinja_template([], chat_template=chat_template)
    except TemplateSyntaxError as error:
        raise ValueError(f"chat_template is not valid Jinja; line {error.lineno}: {error.message}") from error
    return chat_template


def template_text(chat_template: str) -> str:
    """Return a Jinja text unchanged, and the content of a file that is named instead.

    Raises:
        ValueError: the file cannot be read.
    """
    # Without a tag the template would give the same prompt for every row, so a text without one is a path.
    if not any(tag in chat_template for tag in ("{{", "{%")):
        file = Path(chat_template).expanduser()
        try:
            chat_template = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"chat_template={chat_template!r} is neither Jinja text nor a file that can be read "
                f"({first_line(error)}); set it to one of them"
            ) from error
    return chat_template


def set_template_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Set variables at the start of the chat template, so that they apply wherever the template is used.

    Raises:
        ValueError: there is no template, or it does not read one of the variables.
    """
    template = tokenizer.chat_template
    if not arguments:
        return tokenizer
    if not isinstance(template, str):
        raise ValueError("model.template_arguments needs a chat template, and the tokenizer has none; do not set it")
    if unread := [name for name in arguments if not re.search(rf"\b{re.escape(name)}\b", template)]:
        raise ValueError(f"model.template_arguments has {', '.join(unread)}, which the chat template does not read")
    settings = ""
    for name, value in arguments.items():
        # Jinja accepts JSON's true and false, but calls null none.
        text = "none"
        if value is not None:
            text = json.dumps(value)
        settings += f"{{%- set {name} = {text} -%}}"
    if not template.startswith(settings):  # a tokenizer that such a run has saved has them already
        tokenizer.chat_template = settings + template
    return tokenizer
