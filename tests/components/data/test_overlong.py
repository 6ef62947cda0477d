"""Truncation of long prompts, and additional columns of prompts."""

import json
from typing import Any

import pytest

from components.data.prompts import Overlong, PromptSource
from plugins.demo.tiny_model import character_tokenizer
from plugins.generation_ahead.savable import check_savable
from tests.messages import says

ROWS = [{"input": "abcdefg", "label": 0}, {"input": "ab", "label": 1}, {"input": "abcdef", "label": 2}]


def source(overlong: Overlong, most: int | None, rows: list[dict[str, Any]] = ROWS) -> PromptSource:
    tokenizer = character_tokenizer("abcdefg")
    return PromptSource(rows, tokenizer, 0, shuffle=False, max_prompt_tokens=most, overlong=overlong)


@pytest.mark.parametrize(
    ("overlong", "most", "expected"),
    [
        ("left", 3, ["efg", "ab", "def"]),
        ("right", 3, ["abc", "ab", "abc"]),
        # Of 3 tokens, half rounded down is 1 token from the beginning. The other 2 come from the end.
        ("middle", 3, ["afg", "ab", "aef"]),
        ("middle", 6, ["abcefg", "ab", "abcdef"]),
        ("middle", 1, ["g", "b", "f"]),
    ],
)
def test_a_long_prompt_is_truncated_on_the_configured_side(overlong: Overlong, most: int, expected: list[str]) -> None:
    cut = source(overlong, most)
    batch = cut.take(3)
    # Ids 0 to 2 are special tokens. Letters follow.
    assert ["".join("abcdefg"[t - 3] for t in batch.row(i, "tokens").tolist()) for i in range(3)] == expected
    assert batch["prompt"] == expected
    assert cut.first()[0] == expected[0]
    assert (len(cut), cut.too_long, cut.longest) == (3, 0, (0, 7))
    assert cut.cut == sum(len(row["input"]) > most for row in ROWS)


def test_without_truncation_long_prompts_are_dropped_and_without_a_limit_all_are_kept() -> None:
    left_out = source("leave_out", 6)
    assert (len(left_out), left_out.too_long, left_out.cut) == (2, 1, 0)
    assert (source("left", None).cut, source("left", 7).cut) == (0, 0)


def test_a_resumed_source_with_truncation_continues_with_the_next_prompt() -> None:
    first = source("left", 3)
    first.take(2)
    restored = source("left", 3)
    restored.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert restored.take(1)["prompt"] == ["def"]


def test_extra_info_of_rows_is_passed_on() -> None:
    rows = [{**ROWS[1], "extra_info": {"index": 7, "tags": ["x"]}}, ROWS[2]]
    assert source("leave_out", None, rows).take(2)["extra_info"] == [{"index": 7, "tags": ["x"]}, None]
    assert "extra_info" not in source("leave_out", None).take(1)
    check_savable(source("leave_out", None, rows))
    with pytest.raises(ValueError, match=says("extra_info", "asynchronous.enabled")):
        check_savable(source("leave_out", None, [{**ROWS[1], "extra_info": {1, 2}}]))
