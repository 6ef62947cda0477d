"""Numbers of rows that are counted before a run starts."""

from pathlib import Path

from training.launch.row_counts import steps_text


def test_the_number_of_steps_is_printed_if_rows_can_be_counted_quickly(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n\n{"x": 2}\n')
    assert steps_text(str, f"{tmp_path}/a.jsonl", None) == "2"
    assert steps_text(str, f"{tmp_path}/a.jsonl,task:sort", 9) == "9"
    assert steps_text(str, "task:sort", None) == "10000"
    assert "org/data" in steps_text(str, "org/data", None)
    with (tmp_path / "large.jsonl").open("wb") as file:
        file.truncate(65_000_000)
    assert str(tmp_path / "large.jsonl") in steps_text(str, f"{tmp_path}/large.jsonl", None)
