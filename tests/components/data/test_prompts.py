"""Loading of prompts, mixtures of sources, and the order of epochs."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets.config
import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from components.data.prompts import PromptSource, load_rows
from plugins.demo.tasks import SortTask
from plugins.demo.tiny_model import character_tokenizer
from plugins.generation_ahead.savable import check_savable
from tests.messages import says

RECORDS = [{"question": "ab", "answer": 1, "more": 0}, {"question": "ba", "answer": 2, "more": 0}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer("abcdefghij{}:")


def letters(count: int) -> list[dict[str, Any]]:
    return [{"input": "abcdefghij"[: i + 1], "label": i, "datasource": "default"} for i in range(count)]


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def write_inputs(path: Path, inputs: str) -> str:
    return write(path, [{"input": letter} for letter in inputs])


def inputs(rows: list[dict[str, Any]]) -> str:
    return "".join(row["input"] for row in rows)


def test_rows_have_prompt_label_and_data_source(tmp_path: Path) -> None:
    source = write(tmp_path / "data.jsonl", RECORDS)
    assert load_rows(source, "question", "answer") == [
        {"input": "ab", "label": 1, "datasource": "default", "extra_info": {"answer": 1, "more": 0}},
        {"input": "ba", "label": 2, "datasource": "default", "extra_info": {"answer": 2, "more": 0}},
    ]
    assert load_rows(source, "question", max_rows=1) == [
        {"input": "ab", "label": "", "datasource": "default", "extra_info": {"answer": 1, "more": 0}}
    ]


def test_a_label_may_be_any_value_except_null_and_a_row_sets_its_data_source(tmp_path: Path) -> None:
    labels = ["a", 1.5, 7, True, ["x", 2], {"tests": [1]}]
    records = [{"input": "a", "label": label, "datasource": n or None} for n, label in enumerate(labels)]
    rows = load_rows(write(tmp_path / "data.jsonl", records), label_key="label")
    assert [row["label"] for row in rows] == labels
    assert [row["datasource"] for row in rows] == ["default", "1", "2", "3", "4", "5"]


def test_messages_of_a_table_are_valid_prompts(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"input": turns}]), tmp_path / "data.parquet")
    assert load_rows(str(tmp_path / "data.parquet"))[0]["input"] == turns


def test_a_task_needs_no_file_and_no_keys() -> None:
    def of_sort(rows: list[dict[str, str]]) -> list[dict[str, str]]:
        return [{**row, "datasource": "sort"} for row in rows]

    assert load_rows("task:sort", max_rows=5, seed=1) == of_sort(SortTask().rows("train", 5, seed=1))
    assert load_rows("task:sort", heldout=True, max_rows=5) == of_sort(SortTask().rows("heldout", 5, seed=0))
    assert load_rows("task:sort", split="heldout", max_rows=5) == load_rows("task:sort", heldout=True, max_rows=5)
    assert len(load_rows("task:sort", max_rows=10_001)) == 10_001


def test_evaluation_reads_the_train_split_of_files_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "data"
    data.mkdir()
    write_inputs(data / "train.jsonl", "ab")
    write_inputs(data / "test.jsonl", "c")
    assert inputs(load_rows(f"{data}/train.jsonl", heldout=True)) == "ab"
    assert inputs(load_rows(str(data), heldout=True)) == "ab"
    assert inputs(load_rows(str(data), split="test")) == "c"
    with pytest.raises(ValueError, match=says("'sort'", "'test'", "'train'", "'heldout'")):
        load_rows(f"{data}, task:sort", split="test")


def test_parts_are_concatenated_and_the_first_rows_up_to_the_limit_are_used(tmp_path: Path) -> None:
    first = write_inputs(tmp_path / "1.jsonl", "abc")
    second = write_inputs(tmp_path / "2.jsonl", "de")
    assert inputs(load_rows(f"{first} , {second}")) == "abcde"
    assert inputs(load_rows(f"{first},{second}", max_rows=4)) == "abcd"
    both = load_rows(f"task:sort,{first}", max_rows=20)
    assert [row["datasource"] for row in both] == ["sort"] * 20
    both = load_rows(f"{first},task:sort")
    assert Counter(row["datasource"] for row in both) == {"default": 3, "sort": 10_000}


def test_a_blend_uses_every_row_with_the_given_probabilities(tmp_path: Path) -> None:
    few = write(tmp_path / "few.jsonl", [{"input": "few", "label": {"n": n}} for n in range(3)])
    many = write(tmp_path / "many.jsonl", [{"input": "many", "label": n} for n in range(3000)])
    rows = load_rows(f"{few},{many}", label_key="label", probs="0.25, 0.75", seed=1)
    labels = [row["label"] for row in rows]
    assert sorted(label for label in labels if isinstance(label, int)) == list(range(3000))
    # The small part is repeated: 3,000 rows of the large one are three quarters of 4,000.
    assert len(rows) == pytest.approx(4000, rel=0.05)
    assert [label["n"] for label in labels if isinstance(label, dict)][:7] == [0, 1, 2, 0, 1, 2, 0]
    for seed, same in ((1, True), (2, False)):
        again = load_rows(f"{few},{many}", label_key="label", probs="0.25,0.75", seed=seed, max_rows=500)
        assert (again == rows[:500]) == same


def test_a_bad_mixture_is_described_in_the_error(tmp_path: Path) -> None:
    a = write_inputs(tmp_path / "a.jsonl", "a")
    b = write_inputs(tmp_path / "b.jsonl", "b")
    assert Counter(inputs(load_rows(f"{a},{b}", probs="0.3333334,0.6666667"))) >= Counter("ab")
    for probs in ("1", "0.5,0.6", "0,1", "1.5,-0.5", "0.2,0.3,0.5", "nan,1"):
        with pytest.raises(ValueError, match=says(f"probs='{probs}'", "2 parts")):
            load_rows(f"{a},{b}", probs=probs)
    with pytest.raises(ValueError, match=says("probs='x,1'", "'x'")):
        load_rows(f"{a},{b}", probs="x,1")
    with pytest.raises(ValueError, match=says(f"'{a},'")):
        load_rows(f"{a},")


def test_bad_data_is_described_in_the_error_with_file_and_row(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", RECORDS)
    with pytest.raises(ValueError, match=says(good, "row 0", "'prompt'", "'question'", "'answer'", "'more'")):
        load_rows(good, "prompt")
    with pytest.raises(ValueError, match=says(good, "row 0", "'answer'", "int", 1, "prompt_key")):
        load_rows(good, "answer")
    with pytest.raises(ValueError, match=says(tmp_path / "nothing.jsonl", ".parquet")):
        load_rows(f"{good},{tmp_path}/nothing.jsonl", "question")


def test_an_epoch_has_every_row_once_and_each_epoch_has_another_order(tokenizer: PreTrainedTokenizerFast) -> None:
    source = PromptSource(letters(10), tokenizer, seed=0)
    first = source.take(10)["label"]
    second = source.take(10)["label"]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert PromptSource(letters(10), tokenizer, seed=0).take(10)["label"] == first
    assert PromptSource(letters(10), tokenizer, seed=1).take(10)["label"] != first


def test_a_batch_has_ids_text_label_and_a_unique_prompt_id(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"input": "ab", "label": "x", "datasource": "letters"}, {"input": "c", "label": None}]
    source = PromptSource(rows, tokenizer, 0, shuffle=False)
    batch = source.take(3)
    assert batch["tokens"].tolist() == [3, 4, 5, 3, 4]
    assert batch.lengths.tolist() == [2, 1, 2]
    assert batch["prompt"] == ["ab", "c", "ab"]
    assert batch["label"] == ["x", None, "x"]
    assert batch["datasource"] == ["letters", "default", "letters"]
    # There are two rows, so the second epoch begins at 2 * 1.
    assert batch["prompt_id"].tolist() == [0, 1, 2]


def test_a_restored_source_continues_with_the_next_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    source = PromptSource(letters(10), tokenizer, seed=0)
    source.take(13)
    state = json.loads(json.dumps(source.state_dict()))
    expected = source.take(20)
    restored = PromptSource(letters(10), tokenizer, seed=0)
    restored.load_state_dict(state)
    assert restored.take(20)["prompt_id"].tolist() == expected["prompt_id"].tolist()


def test_a_state_of_other_data_or_seed_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    state = PromptSource(letters(10), tokenizer, seed=0).state_dict()
    with pytest.raises(ValueError, match=says("seed=0", 1)):
        PromptSource(letters(10), tokenizer, seed=1).load_state_dict(state)
    others = (PromptSource(letters(9), tokenizer, seed=0), PromptSource(letters(10), tokenizer, 0, max_prompt_tokens=9))
    for other in others:
        with pytest.raises(ValueError, match="rows="):
            other.load_state_dict(state)


def test_long_prompts_are_dropped_and_counted_at_the_start(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    source = PromptSource(letters(6), tokenizer, seed=0, max_prompt_tokens=4)
    # Of the lengths 1 to 6, two are above 4.
    assert (len(source), source.too_long) == (4, 2)
    batch = source.take(8)
    assert Counter(batch["label"]) == {0: 2, 1: 2, 2: 2, 3: 2}
    # Ids count all six rows, so the second epoch begins at 6.
    assert sorted(batch["prompt_id"].tolist()) == [0, 1, 2, 3, 6, 7, 8, 9]
    with pytest.raises(ValueError, match=says("6 prompts", "max_prompt_tokens=0", 1)):
        PromptSource(letters(6), tokenizer, seed=0, max_prompt_tokens=0)


def test_dropping_rows_keeps_the_order_of_the_others(tokenizer: PreTrainedTokenizerFast) -> None:
    every = PromptSource(letters(10), tokenizer, seed=3).take(10)["label"]
    short = PromptSource(letters(10), tokenizer, seed=3, max_prompt_tokens=5).take(5)["label"]
    assert short == [label for label in every if label < 5]


@pytest.mark.full
def test_all_of_100_000_rows_are_read_and_counted(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    text = "".join(json.dumps({"input": row["input"], "label": ""}) + "\n" for row in letters(10))
    (tmp_path / "data.jsonl").write_text(text * 10_000)
    source = PromptSource(load_rows(f"{tmp_path}/data.jsonl"), tokenizer, seed=0, max_prompt_tokens=9)
    assert (len(source), source.too_long) == (90_000, 10_000)
    rows = letters(10) * 210
    with pytest.raises(ValueError, match=says("row 2100", "'x'")):
        PromptSource([*rows, {"input": "x", "label": ""}], tokenizer, seed=0)


def test_showing_the_first_prompt_does_not_consume_it(tokenizer: PreTrainedTokenizerFast) -> None:
    source = PromptSource([{"input": "ab", "label": 0}, {"input": "c" * 40, "label": 0}], tokenizer, 0, shuffle=False)
    assert source.first() == ("ab", [3, 4])
    assert re.search(says("2 characters", "2 tokens", "'ab'", "[3, 4]"), source.describe_first())
    assert source.take(1)["prompt"] == ["ab"]
    assert re.search(says("40 characters", "40 tokens", "'cccc'", 32, [5] * 32), source.describe_first(limit=4))
    source.take(1)
    # The epoch has ended: the next prompt is the first one of the next epoch.
    assert source.first() == ("ab", [3, 4])


@pytest.mark.parametrize("taken", [0, 4, 9, 10, 13])
def test_a_source_can_be_rewound_to_a_number_of_consumed_prompts(
    tokenizer: PreTrainedTokenizerFast, taken: int
) -> None:
    source = PromptSource(letters(10), tokenizer, seed=0)
    if taken:
        source.take(taken)
    assert source.taken == taken
    expected = source.take(12)["prompt_id"].tolist()
    source.taken = taken
    assert source.taken == taken
    assert source.take(12)["prompt_id"].tolist() == expected


def test_the_shown_prompt_after_an_epoch_is_the_next_one_returned(tokenizer: PreTrainedTokenizerFast) -> None:
    source = PromptSource(letters(10), tokenizer, seed=0, max_prompt_tokens=7)
    source.take(7)
    first = source.first()[0]
    assert source.take(1)["prompt"] == [first]


def test_a_template_inserts_the_prompt_and_keeps_other_braces(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"input": "a{b}", "label": ""}]
    batch = PromptSource(rows, tokenizer, 0, input_template="c:{}:d").take(1)
    assert batch["prompt"] == ["c:a{b}:d"]


def test_characters_without_a_token_raise_an_error_before_the_first_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=says("'xy'", "'axby'", "':abcdefghij{}'")):
        PromptSource([{"input": "axby", "label": ""}], tokenizer, 0)
    with pytest.raises(ValueError, match=says("row 0", "''")):
        PromptSource([{"input": "", "label": ""}], tokenizer, 0)


def test_a_prompt_that_cannot_be_rendered_raises_an_error_with_its_row() -> None:
    tokenizer = character_tokenizer("ab")
    tokenizer.chat_template = (
        "{{ messages[0]['content'] }}{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}"
    )
    turn = {"role": "user", "content": "a"}
    rows = [{"input": "a", "label": ""}, {"input": [turn, turn], "label": ""}]
    with pytest.raises(ValueError, match=says("row 1", "one turn")):
        PromptSource(rows, tokenizer, 0)
    for wrong in ([], None, [{"role": "user"}]):
        with pytest.raises(ValueError, match=says("row 1", "role", "content")):
            PromptSource([rows[0], {"input": wrong, "label": ""}], tokenizer, 0)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=says("row 1", "apply_chat_template")):
        PromptSource(rows, tokenizer, 0)


def test_labels_that_a_checkpoint_cannot_hold_raise_an_error_at_the_start(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    check_savable(PromptSource([{"input": "ab", "label": {"a": [1, "b"]}}], tokenizer, 0))
    with pytest.raises(ValueError, match=says("labels", "asynchronous.enabled")):
        check_savable(PromptSource([{"input": "ab", "label": {"a": {1, 2}}}], tokenizer, 0))


def test_a_column_without_a_value_in_a_row_is_none_for_reward_functions(tmp_path: Path) -> None:
    source = write(tmp_path / "data.jsonl", [{"input": "a"}, {"input": "b", "hint": "c"}, {"input": "d", "hint": None}])
    assert [row["extra_info"] for row in load_rows(source)] == [{"hint": None}, {"hint": "c"}, {"hint": None}]
