"""Write the results of check_gpu.py into docs/gpu.md.

    python scripts/gpu_page.py gpu.json

The section "Results" of the page is replaced. The other sections stay as they are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gpu.md"
HEADING = "## Results\n"
NEXT = "\n## "


def results(stages: dict[str, Any]) -> str:
    """Return the section as Markdown."""
    parts = [HEADING]
    for name, stage in sorted(stages.items()):
        parts.append(
            f"\n**Stage {name}**: {stage['what']}. {stage['device']}, {stage['day']}, {stage['seconds']:.0f} s.\n"
        )
        parts.append("\n| check | measured | required | verdict |\n|---|---|---|---|\n")
        for row in stage["rows"]:
            # A bar would end the cell of the table.
            cells = (row[cell].replace("|", "/") for cell in ("check", "measured", "required", "verdict"))
            parts.append("| " + " | ".join(cells) + " |\n")
    return "".join(parts)


def with_results(page: str, stages: dict[str, Any]) -> str:
    """Return the page with its section of results replaced."""
    before, _, rest = page.partition(HEADING)
    _, _, after = rest.partition(NEXT)
    return before + results(stages) + NEXT + after


if __name__ == "__main__":
    measured_stages = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    PAGE.write_text(with_results(PAGE.read_text(encoding="utf-8"), measured_stages), encoding="utf-8")
