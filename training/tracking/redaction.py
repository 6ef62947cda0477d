"""Redaction of keys, tokens and passwords. They are recognised by name, by format, or as a known value."""

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
# Names that end like that of a secret, but are columns of the data or special tokens of a vocabulary.
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
# Value of an Authorization header, with or without a scheme such as Bearer.
_HEADER = re.compile(
    r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token)\s+)?|\bbearer\s+)[\w\-.~+/=]{8,}"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_URL_PARAMETER = re.compile(r"(?<=[?&])([\w.\-]+)=([^&\s#]+)")
_SWITCHES = {"", "true", "false", "yes", "no", "on", "off", "0", "1", "none", "null"}
_KNOWN_LENGTH = 16
"""Minimum length of a secret that is also redacted in other texts. A shorter one may be an ordinary word."""

_known: set[str] = set()


def remember_secret(value: str | None) -> None:
    """Redact this value from now on in every text that passes `hide_in_text`, whatever its format."""
    # Text with blanks is rather a sentence than a key. Redacted, it would vanish from messages.
    if value and len(value) >= _KNOWN_LENGTH and not any(letter.isspace() for letter in value):
        _known.add(value)


def redact(config: Any) -> Any:
    """Copy a configuration as plain dicts, lists and scalars, with keys, tokens and passwords redacted.

    A value is redacted if its name is that of a secret (`wandb.key`, `HF_TOKEN`, `api_key`, or `use_wandb` with a value
    other than true or false), also as `name=value` in a text or after `--name` in a list. It is also redacted if it has
    the format of a secret (`hf_...`, a login in a URL). Names such as `input_key` or `max_tokens` are not those of
    secrets. A value that was redacted because of its name is remembered: `hide_in_text` then removes it from the text
    of an error too.
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
    """Redact values with the format of a key or a login, and the values that `redact` has found by their names."""
    # Long ones first: if a short secret is the beginning of a long one, the rest of the long one would stay visible.
    for secret in sorted(_known, key=len, reverse=True):
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
    # A switch such as use_wandb=true holds no key. Redacted, the record would not show if it was on.
    return _hide(value) if isinstance(value, str) and value.lower() not in _SWITCHES else redact(value)


def _hide(secret: str) -> str:
    remember_secret(secret)
    return HIDDEN


def _redact_list(items: list[Any]) -> list[Any]:
    """Redact a list, which may be a command line with `--name value`, `--name=value` and `name=value`."""
    result: list[Any] = []
    flag = ""
    for item in items:
        text = item if isinstance(item, str) else ""
        name, equals, value = text.partition("=")
        if equals and _is_secret(name.lstrip("-")) and value.lower() not in _SWITCHES:
            result.append(f"{name}={_hide(value)}")
        else:
            result.append(_hide_named(flag, item))
        # The next item is the value of this flag. It may be a secret that only the name of the flag reveals.
        flag = text.removeprefix("--") if text.startswith("--") else ""
    return result


def _is_secret(name: str) -> bool:
    # OpenRLHF's --use_wandb takes the API key itself.
    if name.replace("-", "_").lower().endswith("use_wandb"):
        return True
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name.replace("-", "_"))
