"""Child process that tries a tokenizer and a chat template, which may hang, abort or exhaust the memory.

It imports few modules, because the start of a run waits for it.
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
"""Maximum address space in bytes. A tokenizer of 256,000 tokens takes a tenth of it."""
MOST_CPU_S = 8
"""Maximum CPU time in seconds. The largest tokenizers take 2 s."""
MOST_TEXT = 10_000_000
"""Maximum number of characters that a template may render from a conversation of a few words."""
_SAMPLES = (
    "The quick brown fox jumps over the lazy dog. 1234567890 + 3.14 = ?\n\n\tdef f(x):\n    return x\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!",
    "a" * 2000,
    " " * 2000 + "a",
    "1" * 2000 + "\n" * 500,
    "\u00e9\u4f60\u597d\U0001f600 \u0301\u0301 \ufb01 " * 50,
)
"""Ordinary texts, and long runs of a single character, for which a bad regular expression takes exponential time."""
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tag of chat templates around the text of the assistant, which Jinja does not support."""


def tried(request: dict[str, Any]) -> str | None:
    """Use a tokenizer.json or chat templates. Return the limit that they exceed, or None.

    Args:
        request: `tokenizer_file`, a path or None; `templates`, texts; `conversations` with arguments of the template;
            `tokens`, special tokens that a template may write, by name.
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
    """Raised if a template renders more than `MOST_TEXT` characters."""


def _try_tokenizer(path: str) -> None:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - transformers has a better message when it loads the tokenizer
        return
    for text in _SAMPLES:
        tokenizer.encode(text)


def _try_template(template: str, conversations: list[Any], tokens: dict[str, str]) -> None:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    # The functions that transformers adds to the environment of chat templates.
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: form
    for messages, options in conversations:
        length = 0
        try:
            # Rendered in pieces, so that an endless loop is stopped by the limit before it fills the memory.
            for piece in environment.from_string(_GENERATION.sub("", template)).generate(
                messages=messages, **{"tools": None, **tokens, **options}
            ):
                length += len(piece)
                if length > MOST_TEXT:
                    raise _TooLongError(f"it makes more than {MOST_TEXT:,} characters of {len(messages)} messages")
        except (MemoryError, _TooLongError):
            raise
        except Exception:  # noqa: BLE001 - a template may reject a conversation with any exception
            continue


def _refuse(message: str) -> None:
    raise ValueError(message)


def _serve(channel: socket.socket) -> None:
    # Libraries in Rust and C print long texts before they abort.
    with Path(os.devnull).open("w") as devnull:
        os.dup2(devnull.fileno(), 2)
        os.dup2(devnull.fileno(), 1)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S + 1))
    # A crash must not write a core file of gigabytes into the user's folder.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve_calls(channel, tried)


if __name__ == "__main__":
    run_child(_serve)
