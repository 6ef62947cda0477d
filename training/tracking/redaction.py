"""Hiding of keys, tokens and passwords, by name, by format, or because the value is known."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(^|[._\-])(api_?key|access_?key|private_?key|secret(_?key)?|password|passwd|credentials?|key|token|authorization"
    r"|sig|signature)$",
    re.IGNORECASE,
)
# Names that end like a secret and are none: fields of the data, and marks of the vocabulary.
_HARMLESS_NAME = re.compile(
    r"(input|label|output|prompt|response|chosen|rejected|images?|messages?|metric|answer|fn|eos|bos|pad|unk|stop|mask"
    r"|sep|cls|source)_(key|token)$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[\w\-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w\-]{16,}"
    r"|wandb_v1_[\w\-]{16,}|xox[abeoprs]-[\w\-]{10,}|A[KS]IA[0-9A-Z]{16}\b|AIza[\w\-]{35}"
    r"|eyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*)"
)
# What stands after the name of the header, with or without the kind of login.
_HEADER = re.compile(
    r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token)\s+)?|\bbearer\s+)[\w\-.~+/=]{8,}"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_URL_PARAMETER = re.compile(r"(?<=[?&])([\w.\-]+)=([^&\s#]+)")
_SWITCHES = {"", "true", "false", "yes", "no", "on", "off", "0", "1", "none", "null"}
_KNOWN_LENGTH = 16
"""Characters from which a value that stood under a secret's name is looked for elsewhere. Shorter ones may be words."""

_known: set[str] = set()


def remember_secret(value: str | None) -> None:
    """Hide this value from now on wherever this process writes text, whatever it looks like."""
    if value and len(value) >= _KNOWN_LENGTH and not any(letter.isspace() for letter in value):
        _known.add(value)


def redact(config: Any) -> Any:
    """Copy a configuration as plain dicts, lists and scalars, with keys, tokens and passwords hidden.

    What hides a value is its name (`wandb.key`, `HF_TOKEN`, `api_key`, `use_wandb` unless it is a switch), the
    same in a text `name=value` or after `--name` in a list, or its own look (`hf_...`, a login in a URL). Names
    such as `input_key` or `max_tokens` are no secrets. What was hidden by its name is remembered, so that
    `hide_in_text` finds it in the text of an error too.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(name): _hide_named(str(name), value) for name, value in config.items()}
    if isinstance(config, (list, tuple, set, frozenset)):
        return _redact_list(list(config))
    if config is None or isinstance(config, (bool, int, float)):
        return config
    return hide_in_text(str(config))


def hide_in_text(text: str) -> str:
    """Hide what looks like a key or a login, and every value that `redact` has met under a secret's name."""
    for secret in sorted(_known, key=len, reverse=True):  # one may be the beginning of another
        text = text.replace(secret, HIDDEN)
    text = _HEADER.sub(lambda match: f"{match[1]}{HIDDEN}", _SECRET_VALUE.sub(HIDDEN, text))
    if "://" not in text:
        return text
    text = _URL_LOGIN.sub(HIDDEN, text)
    return _URL_PARAMETER.sub(lambda match: f"{match[1]}={HIDDEN}" if _is_secret(match[1]) else match[0], text)


def _hide_named(name: str, value: Any) -> Any:
    if not _is_secret(name):
        return redact(value)
    if isinstance(value, (list, tuple)):
        return [_hide_named(name, item) for item in value]
    return _hide(value) if isinstance(value, str) and value.lower() not in _SWITCHES else redact(value)


def _hide(secret: str) -> str:
    remember_secret(secret)
    return HIDDEN


def _redact_list(items: list[Any]) -> list[Any]:
    """Redact a list, which may be a command line: `--name value`, `--name=value` and `name=value`."""
    result: list[Any] = []
    previous = ""
    for item in items:
        name, equals, value = item.partition("=") if isinstance(item, str) else ("", "", "")
        if equals and _is_secret(name.lstrip("-")) and value.lower() not in _SWITCHES:
            result.append(f"{name}={_hide(value)}")
        else:
            result.append(_hide_named(previous.removeprefix("--") if previous.startswith("--") else "", item))
        previous = item if isinstance(item, str) else ""
    return result


def _is_secret(name: str) -> bool:
    if name.replace("-", "_").lower().endswith("use_wandb"):
        return True
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name.replace("-", "_"))
