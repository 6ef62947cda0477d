"""Cells of rows as text, messages, labels and numbers, from every type of file."""

import datetime
import json
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from components.data.cells import label_of, number_of, text_or_messages, without_surrogates
from components.data.prompts import load_rows
from components.data.records import read_records
from components.data.values import check_one_kind, label_text
from components.rewards.code import scored
from components.rewards.scorers import get_scorer
from tests.messages import says

CALLS = [
    [{"function": {"name": "w", "arguments": {"city": "Rome"}}}],
    [{"function": {"name": "t", "arguments": {"zone": "CET"}}}],
    [{"function": {"name": "n", "arguments": {}}}],
]
"""Tool calls with different arguments in each row."""
TURNS = [
    {
        "id": number,
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls, "content": None}],
    }
    for number, calls in enumerate(CALLS)
]


def saved(folder: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    """Write rows to a file or folder of this kind, in which all structs have the union of the fields."""
    if kind == "save_to_disk":
        datasets.Dataset.from_list(rows).save_to_disk(folder / "data")
        return str(folder / "data")
    if kind.startswith("folder"):
        (folder / "data").mkdir()
        folder = folder / "data"
        kind = kind.removeprefix("folder of ")
    path = folder / f"train.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
        next((folder / "saved").glob("*.arrow")).rename(path)
    return str(path if folder.name != "data" else folder)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "save_to_disk", "folder of parquet", "folder of jsonl", "jsonl"])
def test_a_tool_call_keeps_its_original_arguments(tmp_path: Path, kind: str) -> None:
    rows = read_records(saved(tmp_path, kind, TURNS))
    assert [row["messages"][1]["tool_calls"] for row in rows] == CALLS
    prompts = load_rows(saved(tmp_path, "jsonl", TURNS), "messages")
    assert prompts[0]["input"][1] == {"role": "assistant", "tool_calls": CALLS[0], "content": None}


def test_a_null_inside_an_object_is_kept_and_a_null_column_is_absent(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "call": {"unit": None, "x": [None, 1]}, "messages": None}]
    assert read_records(saved(tmp_path, "jsonl", rows)) == [{"prompt": "a", "call": {"unit": None, "x": [None, 1]}}]
    assert read_records(saved(tmp_path, "parquet", rows)) == [{"prompt": "a", "call": {"x": [None, 1]}}]


def test_mixed_types_stored_by_datasets_are_restored(tmp_path: Path) -> None:
    rows = [{"a": {"x": 1}, "b": [{"y": 1}]}, {"a": "s", "b": [2]}]
    data = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "saved")
    assert read_records(tmp_path / "a.parquet") == read_records(tmp_path / "saved") == rows


def labels(path: Path, key: str = "y") -> list[str]:
    return [label_text(row["label"]) for row in load_rows(str(path), "q", key)]


def test_every_cell_of_a_csv_file_is_text(tmp_path: Path) -> None:
    cells = ["0.50", "1", "007", "true", "12345678901234567890", "2024-01-31", "NA", "", "1e5", " x ", "null"]
    (tmp_path / "a.csv").write_text("q,y,margin\n" + "".join(f"what?,{cell},0.5\n" for cell in cells))
    assert labels(tmp_path / "a.csv") == cells
    assert number_of(read_records(tmp_path / "a.csv")[0]["margin"], "margin") == 0.5


def test_scorers_compare_the_digits_of_a_json_number_and_reward_functions_get_a_number(tmp_path: Path) -> None:
    written = ["0.50", "1", "1E5", "12345678901234567890", "-0.0", "0.1", "true", "false", '"x"']
    lines = [f'{{"q": "what?", "y": {cell}, "z": {{"y": {cell}}}}}' for cell in written]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "a.json").write_text(f"[{','.join(lines)}]")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jsonl").write_text("\n".join(lines))
    for name in ("a.jsonl", "a.json", "folder"):
        assert labels(tmp_path / name) == [cell.strip('"') for cell in written]
        assert labels(tmp_path / name, "z.y") == [cell.strip('"') for cell in written]
        rows = load_rows(str(tmp_path / name), "q", "z.y")
        for values in ([row["label"] for row in rows], [row["extra_info"]["y"] for row in rows]):
            assert json.dumps(values) == json.dumps([json.loads(cell) for cell in written])
        assert [label_text(label) for label in pickle.loads(pickle.dumps([row["label"] for row in rows]))] == [
            cell.strip('"') for cell in written
        ]


def test_scorers_compare_with_the_text_of_a_label(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "a", "y": 0.50}\n{"q": "a", "y": true}\n{"q": "a", "y": 7}\n')
    rows = load_rows(str(tmp_path / "a.jsonl"), "q", "y")
    score = get_scorer("exact_match")
    assert [scored(score, text, row["label"]) for text, row in zip(("0.50", "true", "7"), rows)] == [1.0] * 3
    assert [scored(score, text, row["label"]) for text, row in zip(("0.5", "True", "7.0"), rows)] == [0.0] * 3


def test_the_text_of_a_typed_label_is_its_json(tmp_path: Path) -> None:
    day = datetime.date(2024, 1, 31)
    moment = datetime.datetime(2024, 1, 31, 12, 30)
    columns = {
        "0.5": pyarrow.array([0.5]),
        "0.1": pyarrow.array([0.1], pyarrow.float32()),
        "0.50": pyarrow.array([Decimal("0.50")]),
        "7": pyarrow.array([7], pyarrow.int8()),
        "true": pyarrow.array([True]),
        "2024-01-31": pyarrow.array([day]),
        "2024-01-31T12:30:00": pyarrow.array([moment]),
    }
    for text, column in columns.items():
        pyarrow.parquet.write_table(pyarrow.table({"q": ["a"], "y": column}), tmp_path / "a.parquet")
        assert labels(tmp_path / "a.parquet") == [text]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), b"a", datetime.timedelta(1)])
def test_a_label_without_text_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=says("a.jsonl, row 3, column 'y'")):
        label_of(value, "a.jsonl, row 3, column 'y'", "label_key")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("column", ["q", "y"])
def test_a_null_prompt_or_label_is_refused_with_its_row(tmp_path: Path, kind: str, column: str) -> None:
    path = saved(tmp_path, kind, [{"q": "a", "y": "1"}, {"q": "b", "y": "2", column: None}])
    with pytest.raises(ValueError, match=says(path, "row 1", repr(column), "null")):
        load_rows(path, "q", "y")


def test_text_parts_are_joined_and_null_fields_of_messages_are_dropped() -> None:
    parts = [{"type": "text", "text": "Add 3", "image_url": None}, {"type": "text", "text": " and 4"}]
    turn = {"role": "user", "content": parts, "name": None}
    call = {"role": "assistant", "tool_calls": CALLS[0], "reasoning_content": "r"}
    tool = {"role": "tool", "content": "7", "tool_call_id": "1", "name": "w"}
    assert text_or_messages([turn, call, tool], "here", "prompt_key") == [
        {"role": "user", "content": "Add 3 and 4"},
        {**call, "content": None},
        tool,
    ]


@pytest.mark.parametrize(
    ("message", "facts"),
    [
        ({"role": "user", "content": None}, ["message 1", "'user'", "null"]),
        ({"role": "user"}, ["message 1", "'user'", "null"]),
        ({"role": "user", "content": []}, ["message 1", "'user'", "null"]),
        ({"role": "assistant", "content": None}, ["message 1", "'assistant'", "tool_calls"]),
        ({"role": "assistant", "content": None, "tool_calls": []}, ["message 1", "tool_calls"]),
        ({"role": "user", "content": 3}, ["message 1", "int", 3]),
        ({"role": "user", "content": {"text": "a"}}, ["message 1", "dict"]),
        ({"role": "user", "content": ["a"]}, ["message 1", "'a'"]),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, ["message 1", "image_url"]),
        ({"role": "user", "content": [{"type": "input_audio", "text": None}]}, ["message 1", "input_audio"]),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, ["message 1", "text"]),
        ({"role": 3, "content": "a"}, ["message 1", "role", 3]),
    ],
)
def test_a_message_without_text_is_refused_with_its_row_and_position(
    message: dict[str, Any], facts: list[object]
) -> None:
    good = {"role": "user", "content": "a"}
    with pytest.raises(ValueError, match=says("a.jsonl, row 3", *facts, "prompt_key")):
        text_or_messages([good, message], "a.jsonl, row 3", "prompt_key")


def test_mixing_text_and_messages_is_refused_with_both_row_numbers(tmp_path: Path) -> None:
    rows = [{"q": "a"}, {"q": "b"}, {"q": [{"role": "user", "content": "c"}]}]
    path = saved(tmp_path, "jsonl", rows)
    with pytest.raises(ValueError, match=says(path, "row 0", "row 2")):
        load_rows(path, "q")
    check_one_kind(["a", None, "b"], "data")


def test_invalid_utf8_is_refused_with_row_and_column(tmp_path: Path) -> None:
    half = pyarrow.array([b"a", b"\xed\xa0\xbd"], pyarrow.binary()).view(pyarrow.string())
    table = pyarrow.table({"q": ["a", "b"], "y": half})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    (tmp_path / "a.csv").write_bytes(b"q,y\na,a\nb,\xed\xa0\xbd\n")
    for name in ("a.parquet", "a.arrow", "a.csv"):
        with pytest.raises(ValueError, match=says(name, "row 1", "'y'")):
            read_records(tmp_path / name)


def test_two_columns_with_the_same_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("q,y,q\na,b,c\n")
    with pytest.raises(ValueError, match=says("a.csv", "'q'")):
        read_records(tmp_path / "a.csv")


def test_maps_and_decimals_of_a_table_become_dicts_and_numbers(tmp_path: Path) -> None:
    columns = {
        "m": pyarrow.array([[("a", 1), ("b", None)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "d": pyarrow.array([Decimal("12345678901234567890.50")]),
        "b": pyarrow.array([b"\xff"]),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", store_decimal_as_integer=False)
    (row,) = read_records(tmp_path / "a.parquet")
    assert row == {"m": {"a": 1}, "d": Decimal("12345678901234567890.50"), "b": b"\xff"}


def test_lone_surrogates_are_replaced_at_any_depth() -> None:
    assert without_surrogates({"a\ud83d": ["b\udc00", 1, None], "c": "😀"}) == {"a?": ["b?", 1, None], "c": "😀"}
