"""The tables with the items of each guide: `<guide>.csv` next to `test_<guide>.py`."""

import ast
import csv
from pathlib import Path

STATUSES = ("holds", "other spelling", "refused with replacement", "absent")
LEAST_SHARE = 0.95


def rows_of(test_file: Path) -> list[dict[str, str]]:
    """Rows of a guide: `item`, `status`, `test`, `note`."""
    path = test_file.with_name(f"{test_file.stem.removeprefix('test_')}.csv")
    with path.open(encoding="utf-8", newline="") as rows:
        return list(csv.DictReader(rows))


def check_rows(test_file: Path) -> None:
    """Check that each row has a known status and a test of the file, and that enough of them hold."""
    tests = {node.name for node in ast.parse(test_file.read_text()).body if isinstance(node, ast.FunctionDef)}
    rows = rows_of(test_file)
    assert [row for row in rows if row["test"] not in tests or row["status"] not in STATUSES] == []
    assert len({row["item"] for row in rows}) == len(rows)
    assert [row for row in rows if row["status"] != "holds" and not row["note"]] == []
    share = sum(row["status"] == "holds" for row in rows) / len(rows)
    assert share >= LEAST_SHARE, f"{share:.3f}"
