"""OpenRLHF's other flags, read from flags.yaml: names of newer versions, and what is not taken, with the reason."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from training.adapter import Refused

_PAIR = tuple[float, float]
_KINDS: Any = {"switch": bool, "int": int, "float": float, "text": str, "pair": _PAIR, "list": list[str]}
_TABLE = yaml.safe_load((Path(__file__).parent / "flags.yaml").read_text(encoding="utf-8"))

ALIASES: Mapping[str, str] = _TABLE["aliases"]
"""OpenRLHF's name since 0.10 -> the name here."""

GROUPS: Mapping[str, Mapping[str, str]] = _TABLE["groups"]
"""Of each group of options that recipes share: the name there -> the name here."""

RENAMED: Mapping[str, str] = _TABLE["renamed"] | {
    f"{group}.{there}": here for group, names in GROUPS.items() for there, here in names.items()
}
"""Option of a group, as messages name it -> the name here."""

OURS: list[str] = _TABLE["ours"]
"""Options that OpenRLHF does not have."""

OTHER_DEFAULTS: Mapping[str, str] = _TABLE["other_defaults"]
"""OpenRLHF's defaults where ours differ."""

NOT_YET = "not yet: "
"""How the reason begins for what a later version brings."""

REFUSED: Mapping[str, Refused] = {
    flag: Refused(prefix + entry["why"], _KINDS[entry.get("kind", "switch")], entry.get("harmless", ""))
    for section, prefix in (("not_yet", NOT_YET), ("not_taken", ""))
    for entry in _TABLE[section]
    for flag in entry["flags"]
}
"""OpenRLHF's flags that this recipe knows and does not take."""
