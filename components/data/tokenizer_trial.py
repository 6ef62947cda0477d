"""A tokenizer and a chat template are programs of whoever published them: they are tried in a process with limits,
before this one runs them.
"""

from __future__ import annotations

import hashlib
import json
import signal
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from components.data.model_tokens import CONVERSATIONS
from components.data.tokenizer_child import MOST_CPU_S
from components.net.hub import cache_root, cached_folder
from components.process.child_process import Child

TRIAL_S = 120.0
"""Seconds to wait for a trial, which is ended earlier by its CPU time; a busy machine may be slow."""
_LARGE_BYTES = 200_000_000
"""Of a file of a tokenizer, at most."""
_FILES = ("tokenizer_config.json", "chat_template.json", "chat_template.jinja", "special_tokens_map.json")


def try_tokenizer(path: str | Path, chat_template: str | None = None) -> None:
    """Check that loading and using the tokenizer of a model ends, and takes bounded memory.

    Nothing is tried twice in a process, nor on a machine what has passed there once.

    Args:
        path: folder or name on the hub of the model.
        chat_template: Jinja text in place of the tokenizer's own.

    Raises:
        ValueError: it hangs, ends the process, or takes too much memory.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = cached_folder(str(path))
    if not folder.is_dir():
        return  # the hub's library fetches it, and the next run tries it
    file = folder / "tokenizer.json"
    templates = (chat_template,) if chat_template is not None else tuple(_templates(folder))
    digest = hashlib.sha256("\0".join(templates).encode(errors="replace"))
    for part in (file, *(folder / name for name in _FILES)):
        if part.is_file():
            if part.stat().st_size > _LARGE_BYTES:
                raise ValueError(f"{part} has {part.stat().st_size:,} bytes; {_LARGE_BYTES:,} are the most")
            digest.update(part.read_bytes())
    _try_once(str(folder), str(file) if file.is_file() else None, templates, digest.hexdigest())


@lru_cache(maxsize=64)
def _try_once(folder: str, file: str | None, templates: tuple[str, ...], digest: str) -> None:
    passed = cache_root() / "tokenizers" / digest
    if passed.exists() or (file is None and not templates):
        return
    tokens = {name: f"<{name}>" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    request = {"conversations": CONVERSATIONS, "tokens": tokens, "tokenizer_file": None, "templates": ()}
    child = Child("components.data.tokenizer_child")
    try:
        for what, part in (("tokenizer.json", {"tokenizer_file": file}), ("chat template", {"templates": templates})):
            found = child.request(request | part, TRIAL_S)
            if found is not None:
                reason = found if isinstance(found, str) else found[1]
                if signal.SIGXCPU.name in reason:
                    reason = f"it takes more than {MOST_CPU_S} s"
                raise ValueError(
                    f"the {what} of {folder} cannot be used: tried with short texts in a process of its own, {reason}; "
                    "use another model, or another model.tokenizer_path or model.chat_template"
                )
    finally:
        child.kill()
        child.end()
    _mark(passed)


def _mark(passed: Path) -> None:
    try:
        passed.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=passed.parent, delete=False) as mark:
            pass
        Path(mark.name).replace(passed)
    except OSError:
        return  # a home that cannot be written to: it is tried again the next time


def _templates(folder: Path) -> list[str]:
    """Return the chat templates in the files of a tokenizer."""
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in folder.glob("**/*.jinja")]
    for name in ("tokenizer_config.json", "chat_template.json"):
        try:
            settings: Any = json.loads((folder / name).read_bytes())
            found = settings.get("chat_template")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue  # transformers says what is wrong with it
        several = found if isinstance(found, list) else [{"template": found}]
        texts += [str(one["template"]) for one in several if isinstance(one, dict) and one.get("template")]
    return texts
