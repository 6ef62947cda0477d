"""A process that tries a tokenizer and a chat template, which may hang, abort or take all memory. Imports little, since
a run waits for it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import socket
from pathlib import Path
from typing import Any

from components.process.child_process import run_child, serve_calls

MOST_MEMORY = 4 * 2**30
"""Bytes of address space: a tokenizer of 256,000 tokens takes a tenth."""
MOST_CPU_S = 8
"""CPU seconds: the largest tokenizers take two."""
MOST_TEXT = 10_000_000
"""Characters that a template may make of a conversation of some words."""
_SAMPLES = (
    "The quick brown fox jumps over the lazy dog. 1234567890 + 3.14 = ?\n\n\tdef f(x):\n    return x\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!",
    "a" * 2000,
    " " * 2000 + "a",
    "1" * 2000 + "\n" * 500,
    "\u00e9\u4f60\u597d\U0001f600 \u0301\u0301 \ufb01 " * 50,
)
"""Texts as they occur, and long runs of one character, on which a bad pattern takes exponential time."""
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A tag of chat templates that marks what the assistant writes, and that Jinja does not know."""


def tried(request: dict[str, Any]) -> str | None:
    """Return what is wrong with a tokenizer.json or a template; None: nothing that a limit was for.

    Args:
        request: `tokenizer_file`, a path or None; `templates`, texts; `conversations` with the template's arguments;
            `tokens`, the names of special tokens that a template may write.
    """
    try:
        if request["tokenizer_file"] is not None:
            _try_tokenizer(request["tokenizer_file"])
        for template in request["templates"]:
            _try_template(template, request["conversations"], request["tokens"])
    except MemoryError:
        return f"it takes more than {MOST_MEMORY / 2**30:.0f} GB of memory"
    except _TooLongError as error:
        return str(error)
    return None


class _TooLongError(Exception):
    """A template has made a text that no model can read."""


def _try_tokenizer(path: str) -> None:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - what transformers says of it when it loads it is the better message
        return
    for text in _SAMPLES:
        tokenizer.encode(text)


def _try_template(template: str, conversations: list[Any], tokens: dict[str, str]) -> None:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: form
    for messages, options in conversations:
        length = 0
        try:
            for piece in environment.from_string(_GENERATION.sub("", template)).generate(
                messages=messages, **{"tools": None, **tokens, **options}
            ):
                length += len(piece)
                if length > MOST_TEXT:
                    raise _TooLongError(f"it makes more than {MOST_TEXT:,} characters of {len(messages)} messages")
        except (MemoryError, _TooLongError):
            raise
        except Exception:  # noqa: BLE001 - a template may refuse a conversation, in any way
            continue


def _refuse(message: str) -> None:
    raise ValueError(message)


def _serve(channel: socket.socket) -> None:
    # Libraries in Rust and C write pages to it before they abort.
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 2)
        os.dup2(nothing.fileno(), 1)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve_calls(channel, tried)


if __name__ == "__main__":
    run_child(_serve)
