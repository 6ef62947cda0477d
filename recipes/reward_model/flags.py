"""OpenRLHF's other flags of train_rm, read from flags.yaml: its names since 0.10, and what is not taken."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from training.config import Refused

_KINDS: Mapping[str, Any] = {"switch": bool, "int": int, "float": float, "text": str, "list": list[str]}
_TABLE = yaml.safe_load((Path(__file__).parent / "flags.yaml").read_text(encoding="utf-8"))

ALIASES: Mapping[str, str] = _TABLE["aliases"]
"""Their name -> ours. Those of 0.9 are our own names."""

REFUSED: Mapping[str, Refused] = {
    flag: Refused(entry["why"], _KINDS[entry.get("kind", "switch")], entry.get("harmless", ""))
    for entry in _TABLE["not_taken"]
    for flag in entry["flags"]
}
"""What they have and this recipe does not, with the reason."""
