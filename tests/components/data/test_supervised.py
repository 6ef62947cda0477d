"""Demonstrations as token batches with a loss mask."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from components.data.supervised import DemonstrationFormat, encode_demonstrations, load_demonstrations
from plugins.data_rows.demonstrations import DemonstrationReader
from plugins.demo.tiny_model import character_tokenizer
from tests.messages import says

# Ids: pad 0, bos 1, eos 2, then a 3, b 4, c 5, d 6, > 7, newline 8.


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer("abcd>\n")


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def learnt(data: Any, i: int = 0) -> list[int]:
    return data.batch.row(i, "tokens")[data.batch.row(i, "loss_mask")].tolist()


def test_the_prompt_is_masked_and_the_response_with_its_end_token_is_trained_on(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    data = encode_demonstrations([{"prompt": "ba>", "response": "ab"}], tokenizer)
    assert data.batch["tokens"].tolist() == [4, 3, 7, 3, 4, 2]
    assert data.batch["loss_mask"].tolist() == [False, False, False, True, True, True]


def test_the_end_token_occurs_exactly_once(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "a", "response": response} for response in ("b", "b<eos>", "b<eos><eos>", "")]
    data = encode_demonstrations(rows, tokenizer)
    assert [data.batch.row(i, "tokens").tolist() for i in range(4)] == [[3, 4, 2], [3, 4, 2], [3, 4, 2], [3, 2]]


def test_only_assistant_messages_are_trained_on(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    data = encode_demonstrations([{"messages": messages}], tokenizer)
    assert data.batch["tokens"].tolist() == [3, 4, 2, 5, 6, 2]
    assert data.batch["loss_mask"].tolist() == [False, True, True, False, True, True]


def test_tokens_after_the_last_trained_token_are_removed(tokenizer: PreTrainedTokenizerFast) -> None:
    data = encode_demonstrations([{"messages": [turn("assistant", "b"), turn("user", "c")]}], tokenizer)
    assert data.batch["tokens"].tolist() == [4, 2]


def with_template(text: str) -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer("abcd>\n")
    tokenizer.chat_template = text
    return tokenizer


def test_a_newline_after_the_end_token_of_a_template_is_not_trained_on() -> None:
    template = "{% for m in messages %}{{ m['content'] + eos_token + '\n' }}{% endfor %}"
    messages = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    data = encode_demonstrations([{"messages": messages}], with_template(template))
    assert data.batch["tokens"].tolist() == [3, 2, 8, 4, 2, 8, 5, 2, 8, 6, 2]
    assert learnt(data) == [4, 2, 6, 2]


def test_a_template_without_an_end_token_gets_one_at_the_end() -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    with pytest.raises(ValueError, match="turn 1"):
        encode_demonstrations([{"messages": [turn("user", "a"), turn("assistant", "b")]}], with_template(template))
    good = template.replace("{{ m", "{% if m['role'] == 'assistant' %}>{% endif %}{{ m")
    data = encode_demonstrations([{"messages": [turn("user", "a"), turn("assistant", "b")]}], with_template(good))
    assert data.batch["tokens"].tolist() == [3, 7, 4, 2]
    assert learnt(data) == [4, 2]


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    template = (
        "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    messages = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    with pytest.raises(ValueError, match=says("row 0", "turn 3")):
        encode_demonstrations([{"messages": messages}], with_template(template))


def test_prompt_and_response_columns_can_be_rendered_with_the_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "ba>", "response": "ab"}]
    plain = encode_demonstrations(rows, tokenizer)
    chat = encode_demonstrations(rows, tokenizer, DemonstrationFormat(apply_chat_template=True))
    assert chat.batch["tokens"].tolist() == plain.batch["tokens"].tolist()
    assert chat.batch["loss_mask"].tolist() == plain.batch["loss_mask"].tolist()
    wrapped = encode_demonstrations(rows, tokenizer, DemonstrationFormat(input_template="c{}d"))
    assert wrapped.batch["tokens"].tolist() == [5, 4, 3, 7, 6, 3, 4, 2]


def test_nothing_is_dropped_silently(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"prompt": "a", "response": "bbbb"},  # 1 + 4 + 1 tokens
        {"prompt": "a", "response": "b"},
        {"messages": [turn("user", "a")]},
    ]
    data = encode_demonstrations(rows, tokenizer, max_tokens=5)
    assert data.dropped == {"too_long": 1, "nothing_to_learn": 1}
    assert data.kept == len(data.batch) == 1
    assert data.batch["row"].tolist() == [1]
    with pytest.raises(ValueError, match=says("too_long", "max_tokens")):
        encode_demonstrations(rows[:1], tokenizer, max_tokens=5)


def test_rows_of_jsonl_are_loaded_and_invalid_ones_are_named(tmp_path: Path) -> None:
    path = tmp_path / "demonstrations.jsonl"
    rows = [{"prompt": "a", "response": "b"}, {"messages": [turn("user", "a"), turn("assistant", "b")]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert load_demonstrations(path) == rows
    path.write_text(json.dumps(rows[0]) + "\n" + json.dumps({"prompt": "a", "answer": "b"}))
    with pytest.raises(ValueError, match=says("row 1", "'prompt'", "'response'", "'messages'", "'answer'")):
        load_demonstrations(path)
    path.write_text(json.dumps({"messages": "hello"}))
    with pytest.raises(ValueError, match=says("row 0", "'messages'", "role", "content", "hello")):
        load_demonstrations(path)


def test_column_options_are_needed_except_for_two_common_pairs(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def loaded(row: dict[str, Any], **form: Any) -> dict[str, Any]:
        path.write_text(json.dumps(row | {"id": 7}))
        return load_demonstrations(path, DemonstrationFormat(**form))[0]

    pair = {"prompt": "a", "response": "b"}
    talk = [turn("user", "a"), turn("assistant", "b")]
    assert loaded({"input": "a", "output": "b"}) == pair
    assert loaded({"q": "a", "a": "b"}, prompt_key="q", response_key="a") == pair
    assert loaded({"prompt": "a", "answer": "b"}, response_key="answer") == pair
    assert loaded({"talk": talk}, prompt_key="talk") == {"messages": talk}
    assert loaded({"text": "ab"}, plain_text=True) == {"text": "ab"}
    assert loaded({"body": "ab"}, prompt_key="body", plain_text=True) == {"text": "ab"}
    with pytest.raises(ValueError, match=says("row 0", "'q'", "'prompt'", "data.prompt_key")):
        loaded(pair, prompt_key="q", response_key="response")
    with pytest.raises(ValueError, match=says("row 0", "data.response_key", "data.plain_text")):
        loaded(pair, prompt_key="prompt")


def test_the_error_names_the_response_column_for_rows_with_a_system_prompt() -> None:
    record = {"system": "Be brief.", "instruction": "Add 3 and 4.", "output": "7", "question": "What is 5 + 5?"}
    form = DemonstrationFormat(apply_chat_template=True)
    with pytest.raises(ValueError, match=says("data.prompt_key=instruction data.response_key=output, or", "question")):
        DemonstrationReader(form).read(record)


def test_column_options_of_a_file_do_not_change_those_of_a_task() -> None:
    form = DemonstrationFormat(prompt_key="q", response_key="a", plain_text=True, apply_chat_template=True)
    assert form.of("rows.jsonl") is form
    assert form.of("task:sort") == DemonstrationFormat(apply_chat_template=True)
    rows = load_demonstrations("task:sort", form.of("task:sort"), max_rows=3, seed=1)
    assert [set(row) >= {"prompt", "response"} for row in rows] == [True] * 3


def test_training_can_be_limited_to_the_last_message(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    data = encode_demonstrations([{"messages": messages}], tokenizer, DemonstrationFormat(multiturn=False))
    assert data.batch["tokens"].tolist() == [3, 4, 2, 5, 6, 2]
    assert learnt(data) == [6, 2]


def test_a_template_that_rewrites_earlier_turns_is_accepted_if_only_the_last_turn_is_trained_on() -> None:
    template = (
        "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    messages = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    data = encode_demonstrations(
        [{"messages": messages}], with_template(template), DemonstrationFormat(multiturn=False)
    )
    assert data.batch["tokens"].tolist() == [3, 5, 6, 2]
    assert learnt(data) == [6, 2]


def test_assistant_messages_of_the_prompt_are_not_trained_on(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    prompt = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    rows = [{"prompt": prompt, "response": response} for response in ("d", [turn("assistant", "d")])]
    data = encode_demonstrations(rows, tokenizer, DemonstrationFormat(apply_chat_template=True))
    assert data.batch.row(0, "tokens").tolist() == data.batch.row(1, "tokens").tolist() == [3, 4, 2, 5, 6, 2]
    assert learnt(data) == learnt(data, 1) == [6, 2]


def test_plain_text_is_trained_on_from_its_second_token_and_truncated(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rows = [{"text": "abc"}, {"text": "abcdab"}, {"text": "a"}]
    data = encode_demonstrations(rows, tokenizer, DemonstrationFormat(plain_text=True), max_tokens=4)
    assert data.batch["tokens"].tolist() == [3, 4, 5, 3, 4, 5, 6]
    assert data.batch["loss_mask"].tolist() == [False, True, True, False, True, True, True]
    assert (data.kept, data.cut, data.dropped) == (2, 1, {"too_long": 0, "nothing_to_learn": 1})
