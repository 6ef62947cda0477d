"""Loading rows, and handing them out epoch by epoch."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from components.data.prompts import PromptSource, load_rows, read_records, render_prompt
from components.data.tasks import SortTask
from components.data.tiny_model import character_tokenizer

RECORDS = [{"question": "ab", "answer": 1, "more": 0}, {"question": "ba", "answer": 2, "more": 0}]
ROWS = [{"input": "ab", "label": 1}, {"input": "ba", "label": 2}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer("abcdefghij{}:")


def letters(count: int) -> list[dict[str, Any]]:
    return [{"input": "abcdefghij"[: i + 1], "label": i} for i in range(count)]


def write(path: Path) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(RECORDS))
    else:
        path.write_text("\n".join(json.dumps(record) for record in RECORDS) + "\n\n")
    return path


@pytest.mark.parametrize("name", ["data.json", "data.jsonl", "data.parquet"])
def test_all_file_types_give_the_same_rows(tmp_path: Path, name: str) -> None:
    source = str(write(tmp_path / name))
    assert load_rows(source, "question", "answer") == ROWS
    assert load_rows(source, "question", max_rows=1) == [{"input": "ab", "label": ""}]


def test_a_line_separator_inside_a_json_string_does_not_end_the_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"input": "a\u2028b"}\n', encoding="utf-8")
    assert read_records(path) == [{"input": "a\u2028b"}]


def test_a_task_needs_no_file_and_no_keys() -> None:
    assert load_rows("task:sort", max_rows=5, seed=1) == SortTask().rows("train", 5, seed=1)
    assert load_rows("task:sort", split="heldout", max_rows=5) == SortTask().rows("heldout", 5, seed=0)


def test_what_is_wrong_with_the_data_is_said_with_file_and_row(tmp_path: Path) -> None:
    good = str(write(tmp_path / "good.jsonl"))
    with pytest.raises(ValueError, match=r"row 0: there is no field 'prompt', only 'question', 'answer', 'more'"):
        load_rows(good, "prompt")
    with pytest.raises(ValueError, match=r"field 'answer': expected a string or a list .*; set input_key"):
        load_rows(good, "answer")
    with pytest.raises(ValueError, match=r"nothing\.jsonl' does not exist; give a \.json"):
        load_rows(str(tmp_path / "nothing.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"input": "a"}\n{"input": \n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: not valid JSON"):
        load_rows(str(tmp_path / "bad.jsonl"))
    (tmp_path / "data.txt").write_text("a")
    with pytest.raises(ValueError, match=r"none of \.json, \.jsonl, \.parquet"):
        load_rows(str(tmp_path / "data.txt"))
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a list of at least one object"):
        load_rows(str(tmp_path / "empty.json"))


def test_an_epoch_is_every_row_once_and_the_next_has_another_order(tokenizer: PreTrainedTokenizerFast) -> None:
    source = PromptSource(letters(10), tokenizer, seed=0)
    first, second = source.take(10)["label"], source.take(10)["label"]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert PromptSource(letters(10), tokenizer, seed=0).take(10)["label"] == first
    assert PromptSource(letters(10), tokenizer, seed=1).take(10)["label"] != first


def test_a_batch_holds_ids_text_label_and_a_prompt_id_that_never_repeats(tokenizer: PreTrainedTokenizerFast) -> None:
    source = PromptSource([{"input": "ab", "label": "x"}, {"input": "c", "label": None}], tokenizer, 0, shuffle=False)
    batch = source.take(3)
    assert batch["tokens"].tolist() == [3, 4, 5, 3, 4]
    assert batch.lengths.tolist() == [2, 1, 2]
    assert batch["prompt"] == ["ab", "c", "ab"]
    assert batch["label"] == ["x", None, "x"]
    # Two rows, so the second epoch begins at 2 * 1.
    assert batch["prompt_id"].tolist() == [0, 1, 2]


def test_a_restored_source_goes_on_with_the_very_next_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    source = PromptSource(letters(10), tokenizer, seed=0)
    source.take(13)
    state = json.loads(json.dumps(source.state_dict()))
    expected = source.take(20)
    restored = PromptSource(letters(10), tokenizer, seed=0)
    restored.load_state_dict(state)
    assert restored.take(20)["prompt_id"].tolist() == expected["prompt_id"].tolist()


def test_a_state_of_other_data_or_seed_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    state = PromptSource(letters(10), tokenizer, seed=0).state_dict()
    with pytest.raises(ValueError, match="has seed=0, this run has 1"):
        PromptSource(letters(10), tokenizer, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="resume with the same data and seed"):
        PromptSource(letters(9), tokenizer, seed=0).load_state_dict(state)


def test_prompts_that_are_too_long_are_passed_over_and_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    source = PromptSource(letters(6), tokenizer, seed=0, max_prompt_tokens=4)
    # Of the lengths 1 to 6 two are above 4.
    assert Counter(source.take(8)["label"]) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert 2 <= source.too_long <= 4
    with pytest.raises(ValueError, match=r"all 6 prompts are longer than max_prompt_tokens=0"):
        PromptSource(letters(6), tokenizer, seed=0, max_prompt_tokens=0).take(1)


def test_a_template_wraps_the_prompt_and_leaves_other_braces_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"input": "a{b}", "label": ""}]
    batch = PromptSource(rows, tokenizer, 0, input_template="c:{}:d").take(1)
    assert batch["prompt"] == ["c:a{b}:d"]
    with pytest.raises(ValueError, match=r"must hold \{\} once"):
        PromptSource(rows, tokenizer, 0, input_template="c")


def test_chat_messages_and_the_chat_option_go_through_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert render_prompt(turns, tokenizer) == "ab<eos>c"
    assert render_prompt("ab", tokenizer, apply_chat_template=True) == "ab"
    with pytest.raises(ValueError, match="exclude each other"):
        render_prompt("ab", tokenizer, apply_chat_template=True, input_template="{}")


def test_characters_without_a_token_are_refused_instead_of_lost(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"no token for the characters 'xy' of 'axby'; it knows ':abcdefghij\{\}'"):
        PromptSource([{"input": "axby", "label": ""}], tokenizer, 0).take(1)
    with pytest.raises(ValueError, match="row 0: the prompt '' has no tokens"):
        PromptSource([{"input": "", "label": ""}], tokenizer, 0).take(1)
