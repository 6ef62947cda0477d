"""Rows in verl's format."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from components.data.prompts import load_rows
from plugins.verl.rows import load_verl_rows
from tests.messages import says

ASK = [{"role": "user", "content": "1+1?"}]


def row(**changes: Any) -> dict[str, Any]:
    """Return a row in verl's format."""
    base = {"data_source": "sums", "prompt": ASK, "ability": "math", "reward_model": {"style": "rule"}}
    base["reward_model"] = {"style": "rule", "ground_truth": "2"}
    return base | {"extra_info": {"split": "train", "index": 0}} | changes


def write(path: Path, *rows: dict[str, Any]) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(path)


@pytest.mark.parametrize("ending", ["parquet", "json", "jsonl"])
def test_a_row_has_prompt_label_data_source_and_extra_info(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"a.{ending}", row())
    assert load_verl_rows([path]) == [
        {"input": ASK, "label": "2", "datasource": "sums", "extra_info": {"split": "train", "index": 0}}
    ]


def test_several_files_and_tasks_are_concatenated(tmp_path: Path) -> None:
    first = write(tmp_path / "1.jsonl", row(prompt="plain text"))
    second = write(tmp_path / "2.jsonl", row(data_source="other"))
    rows = load_verl_rows([first, second, "task:sort"], max_rows=4)
    assert [each["datasource"] for each in rows] == ["sums", "other", "sort", "sort"]
    assert rows[0]["input"] == "plain text"
    assert rows[2:] == load_rows("task:sort", max_rows=4)[:2]


def test_a_row_limit_takes_the_first_rows_or_a_seeded_sample(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *(row(prompt=str(i)) for i in range(50)))

    def taken(**how: Any) -> list[str]:
        return [each["input"] for each in load_verl_rows([path], max_rows=5, **how)]

    assert taken() == list("01234")
    assert taken(draw=True, seed=1) == taken(draw=True, seed=1) != taken(draw=True, seed=2)
    assert len(set(taken(draw=True, seed=1))) == 5


def test_validation_rows_of_a_task_come_from_its_held_out_split() -> None:
    assert load_verl_rows(["task:sort"], heldout=True, max_rows=3) == load_rows("task:sort", heldout=True, max_rows=3)
    assert len(load_verl_rows(["task:sort"], heldout=True)) == 2048


@pytest.mark.full
def test_a_reasoning_gym_task_sets_the_data_source() -> None:
    (drawn,) = load_verl_rows(["reasoning_gym:chain_sum"], max_rows=1)
    assert drawn["datasource"] == "reasoning_gym:chain_sum"


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"prompt": None}, ["'prompt'", "'ability'", "prompt_key"]),
        ({"data_source": None}, ["'data_source'", "reward_fn_key"]),
        ({"prompt": [{"role": "user"}]}, ["'prompt'", "role", "content", "prompt_key"]),
        ({"reward_model": {"style": "model"}}, ["reward_model.ground_truth"]),
        ({"reward_model": None}, ["reward_model.ground_truth"]),
        ({"images": ["a.png"]}, ["images"]),
    ],
)
def test_a_missing_field_raises_an_error_with_file_and_row(
    tmp_path: Path, changes: dict[str, Any], facts: list[str]
) -> None:
    path = write(tmp_path / "a.jsonl", row(), row(**changes))
    with pytest.raises(ValueError, match=says(path, "row 1", *facts)):
        load_verl_rows([path])


def test_columns_may_be_renamed_and_an_unused_ground_truth_may_be_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "q", "origin": 3, "reward_model": {"style": "model"}})
    rows = load_verl_rows([path], prompt_key="question", source_key="origin", needs_truth=False)
    assert rows == [{"input": "q", "label": "", "datasource": "3"}]


def test_a_prompt_suffices_if_no_reward_function_is_selected_by_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "q"})
    assert load_verl_rows([path], needs_truth=False) == [{"input": "q", "label": "", "datasource": "unknown"}]
    with pytest.raises(ValueError, match=says("reward_model.ground_truth")):
        load_verl_rows([path])
    with pytest.raises(ValueError, match=says("'origin'", "reward_fn_key")):
        load_verl_rows([path], source_key="origin", needs_truth=False)
