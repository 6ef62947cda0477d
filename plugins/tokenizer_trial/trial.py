"""Trial of a tokenizer and a chat template in a child process with limits, before this process uses them.

Both are programs of the publisher of a model, and may hang or exhaust the memory.
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
from components.net.hub import cache_root, cached_folder
from components.process.child_process import Child
from plugins.tokenizer_trial.child import MOST_CPU_S

TRIAL_S = 120.0
"""Timeout of a trial in seconds. Usually the limit of CPU time ends it earlier; a busy machine may be slow."""
_LARGE_BYTES = 200_000_000
"""Maximum size of a file of a tokenizer in bytes."""
_FILES = ("tokenizer_config.json", "chat_template.json", "chat_template.jinja", "special_tokens_map.json")
"""Files, besides tokenizer.json, whose change requires a new trial."""


def try_tokenizer(path: str | Path, chat_template: str | None = None) -> None:
    """Check that the tokenizer of a model can be loaded and used within limits of CPU time and memory.

    A passed trial is cached in the process and on the machine.

    Args:
        path: folder or name on the hub of the model.
        chat_template: Jinja text that replaces the tokenizer's own template.

    Raises:
        ValueError: the trial hangs, ends the process, or exceeds a limit.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = cached_folder(str(path))
    if not folder.is_dir():
        return  # not downloaded yet: transformers downloads it, and the next run tries it
    file = folder / "tokenizer.json"
    templates = tuple(_templates(folder))
    if chat_template is not None:
        templates = (chat_template,)
    # The cache is keyed by content, so that a changed file is tried again.
    digest = hashlib.sha256("\0".join(templates).encode(errors="replace"))
    for part in (file, *(folder / name for name in _FILES)):
        if part.is_file():
            if part.stat().st_size > _LARGE_BYTES:
                raise ValueError(f"{part} has {part.stat().st_size:,} bytes; the maximum is {_LARGE_BYTES:,}")
            digest.update(part.read_bytes())
    _try_once(str(folder), str(file) if file.is_file() else None, templates, digest.hexdigest())


@lru_cache(maxsize=64)
def _try_once(folder: str, file: str | None, templates: tuple[str, ...], digest: str) -> None:
    passed_marker = cache_root() / "tokenizers" / digest
    if passed_marker.exists() or (file is None and not templates):
        return
    tokens = {name: f"<{name}>" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    request = {"conversations": CONVERSATIONS, "tokens": tokens, "tokenizer_file": None, "templates": ()}
    parts = {"tokenizer.json": {"tokenizer_file": file}, "chat template": {"templates": templates}}
    # One child for both: most of the time is the start of the process.
    child = Child(f"{__package__}.child")
    try:
        for name, part in parts.items():
            failure = child.request(request | part, TRIAL_S)
            if failure is not None:
                # A text from the child, or the kind and the reason of its end.
                reason = failure
                if not isinstance(failure, str):
                    reason = failure[1]
                if signal.SIGXCPU.name in reason:
                    reason = f"it takes more than {MOST_CPU_S} s"
                raise ValueError(
                    f"the {name} of {folder} cannot be used: tried with short texts in a child process, {reason}; "
                    "use another model, or another model.tokenizer_path or model.chat_template"
                )
    finally:
        child.kill()
        child.end()
    _mark(passed_marker)


def _mark(passed_marker: Path) -> None:
    try:
        passed_marker.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=passed_marker.parent, delete=False) as temporary:
            pass
        # Renamed, so that two processes can create the same marker.
        Path(temporary.name).replace(passed_marker)
    except OSError:
        return  # the cache folder is not writable: the next run tries the tokenizer again


def _templates(folder: Path) -> list[str]:
    """Return the chat templates in the files of a tokenizer."""
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in folder.glob("**/*.jinja")]
    for name in ("tokenizer_config.json", "chat_template.json"):
        try:
            settings: Any = json.loads((folder / name).read_bytes())
            templates = settings.get("chat_template")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue  # transformers reports the error when it loads the tokenizer
        # A single template is a text, several are a list of {name, template}.
        if not isinstance(templates, list):
            templates = [{"template": templates}]
        texts += [str(entry["template"]) for entry in templates if isinstance(entry, dict) and entry.get("template")]
    return texts
