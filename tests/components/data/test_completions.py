"""Single responses with a label: rows as TRL writes them, pairs that are split, and mismatched responses."""

import string
from typing import Any

import pytest

from components.data.completions import CompletionData, CompletionFormat, encode_completions
from components.data.preferences import check_pairs, read_pairs
from plugins.demo.tiny_model import character_tokenizer
from tests.messages import says

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "completion": " 2", "label": True},
    {"prompt": "1+1=", "completion": " 11", "label": False},
    {"prompt": "a fruit:", "completion": " fig", "label": 1},
    {"prompt": "a dog:", "chosen": " pug", "rejected": " cat"},
]
TOKENIZER = character_tokenizer(string.printable)


def encoded(rows: list[dict[str, Any]], **options: Any) -> CompletionData:
    form = CompletionFormat()
    check_pairs(rows, form)
    return encode_completions(read_pairs(rows, form, TOKENIZER), TOKENIZER, **options)


def texts(data: CompletionData) -> list[tuple[str, str]]:
    """Return prompt and learnt text of each sequence."""
    parts = []
    for row in range(len(data.batch)):
        ids, mask = data.batch.row(row, "tokens"), data.batch.row(row, "loss_mask")
        parts.append((TOKENIZER.decode(ids[~mask]), TOKENIZER.decode(ids[mask], skip_special_tokens=True)))
    return parts


def test_rows_of_trl_and_pairs_become_labelled_responses() -> None:
    data = encoded(ROWS)
    responses = [("1+1=", " 2"), ("1+1=", " 11"), ("a fruit:", " fig"), ("a dog:", " pug"), ("a dog:", " cat")]
    assert texts(data)[::2] == responses
    assert data.batch["is_desirable"][::2].tolist() == [True, False, True, True, False]
    assert data.batch["row"][::2].tolist() == [0, 1, 2, 3, 3]
    assert len(data) == 5


def test_each_mismatched_response_is_of_another_prompt_and_each_response_is_used_once() -> None:
    data = encoded(ROWS)
    mismatched = texts(data)[1::2]
    matched = texts(data)[::2]
    assert [prompt for prompt, _ in mismatched] == [prompt for prompt, _ in matched]
    responses = {prompt: {text for other, text in matched if other == prompt} for prompt, _ in matched}
    assert all(text not in responses[prompt] for prompt, text in mismatched)
    assert sorted(text for _, text in mismatched) == sorted(text for _, text in matched)


def test_a_long_response_is_dropped_and_a_long_mismatched_one_is_truncated() -> None:
    rows = [{"prompt": "p" * 6, "completion": "a", "label": True}, {"prompt": "q", "completion": "b" * 7, "label": 0}]
    data = encoded([*rows, {"prompt": "p" * 6, "completion": "c" * 9, "label": True}], max_tokens=9)
    assert data.dropped == {"too_long": 1, "identical": 0}
    assert texts(data) == [("pppppp", "a"), ("pppppp", "bbb"), ("q", "bbbbbbb"), ("q", "a")]


def test_conversations_have_their_last_message_as_response() -> None:
    prompt = [{"role": "user", "content": "hi"}]
    row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "yo"}], "label": False}
    pairs = read_pairs([row], CompletionFormat(), TOKENIZER)
    assert pairs[0].label is False
    assert (pairs[0].chosen.strip(), pairs[0].chosen) == ("yo", pairs[0].rejected)


def test_the_first_response_of_each_kind_is_described() -> None:
    lines = encoded(ROWS).describe_first(TOKENIZER)
    assert [line.partition(" response")[0] for line in lines] == ["first desirable", "first undesirable"]


def test_the_columns_that_are_read_are_described() -> None:
    text = CompletionFormat().describe_columns(ROWS)
    assert all(name in text for name in ("prompt", "completion", "label", "chosen", "rejected"))


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"prompt": "a", "completion": "b", "label": "yes"}, ["row 1", "'label'", "'yes'", "data.label_key"]),
        ({"prompt": "a", "completion": "b"}, ["row 1", "'label'", "None", "data.label_key"]),
        ({"completion": "b", "label": True}, ["row 1", "no prompt", "data.prompt_key"]),
        ({"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d", "label": True}, ["row 1", "both"]),
        ({"prompt": "a"}, ["row 1", "'chosen'"]),
    ],
)
def test_a_row_that_cannot_be_read_is_named(row: dict[str, Any], facts: list[str]) -> None:
    for read in (lambda rows: check_pairs(rows, CompletionFormat()), encoded):
        with pytest.raises(ValueError, match=says(*facts)):
            read([ROWS[0], row])


def test_one_example_is_too_few() -> None:
    with pytest.raises(ValueError, match=says("1 of the responses", "needs two")):
        encoded(ROWS[:1])
