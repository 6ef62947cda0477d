"""The diffs of docs/variants.md, and lines that replace one of theirs."""

import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[1] / "docs/variants.md").read_text(encoding="utf-8")
DIFFS: dict[str, str] = dict(re.findall(r"\n### ([^\n]+)\n(?:(?!\n#).)*?```diff\n(.*?)```", PAGE, re.DOTALL))
PAIR_LOSSES: dict[str, str] = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| `([^`]+)` \|$", PAGE, re.MULTILINE))
SLIC = "F.relu(1 - beta * z_P)"
"""The line of the diff for pair losses."""
