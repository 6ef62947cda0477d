"""All rows are used unless a limit is set, and the number of rows left out is reported."""

import json
from pathlib import Path

from components.data.preferences import load_pairs
from components.data.prompts import load_rows
from components.data.supervised import load_demonstrations
from recipes.sft.config import DemonstrationOptions


def test_sft_uses_all_of_100_500_rows_by_default(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 100_500)
    limit = DemonstrationOptions(path=str(tmp_path / "a.jsonl")).max_samples
    assert len(load_demonstrations(tmp_path / "a.jsonl", max_rows=limit)) == 100_500


def test_rows_beyond_the_limit_are_counted(tmp_path: Path) -> None:
    rows = {
        "a": {"input": "a"},
        "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
        "demonstrations": {"prompt": "a", "response": "b"},
    }
    sources = {name: str(tmp_path / f"{name}.jsonl") for name in rows}
    for name, row in rows.items():
        Path(sources[name]).write_text(f"{json.dumps(row)}\n" * 5)
    source = sources["a"]
    notes: list[str] = []
    assert len(load_rows(source, max_rows=3, note=notes.append)) == 3
    assert len(load_pairs(sources["pairs"], max_rows=3, note=notes.append)) == 3
    assert len(load_demonstrations(sources["demonstrations"], max_rows=3, note=notes.append)) == 3
    assert notes == [f"3 of 5 rows of {name} are used, 2 are left out" for name in sources.values()]
    load_rows(source, max_rows=5, note=notes.append)
    load_rows(f"{source},{source}", max_rows=5, note=notes.append)
    assert notes[3:] == [f"5 of 10 rows of {source},{source} are used, 5 are left out"]
