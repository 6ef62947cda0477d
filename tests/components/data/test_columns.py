"""Columns of data in common layouts: the tokens that a model reads and trains on, and rejected rows."""

import json
import string
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from components.data.pair_rows import PairFormat
from components.data.preferences import encode_pairs, read_pairs
from components.data.prompts import PromptSource, load_rows
from components.data.supervised import DemonstrationFormat, encode_demonstrations, load_demonstrations
from plugins.data_rows.demonstrations import DemonstrationReader
from plugins.demo.tiny_model import character_tokenizer
from plugins.verl.rows import load_verl_rows
from tests.messages import says

CHAT = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ (c.function or c) | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token per character, and a template that writes roles, tools and calls."""
    made = character_tokenizer(string.printable)
    made.chat_template = CHAT
    return made


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def learnt(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast, **form: Any) -> tuple[str, str]:
    """Return the text of a demonstration, and the part that is trained on."""
    made = DemonstrationFormat(**form)
    data = encode_demonstrations([DemonstrationReader(made).read(row)], tokenizer, made)
    ids = data.batch.row(0, "tokens")
    mask = data.batch.row(0, "loss_mask")
    return str(tokenizer.decode(ids)), str(tokenizer.decode(ids[mask]))


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "prompt", "response"),
    [
        ({"instruction": "Name 3", "input": "", "output": "a"}, "Name 3", "a"),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, "Add\n\n1 2", "3"),
        ({"instruction": "Who?", "context": "Ann ran.", "response": "Ann"}, "Who?\n\nAnn ran.", "Ann"),
        ({"instruction": "", "input": "1 2", "output": "3"}, "1 2", "3"),
        # As in a well-known data set, the column `text` repeats the complete conversation.
        ({"instruction": "Add", "input": "1", "output": "3", "text": "Below: Add\n\n1 Response: 3"}, "Add\n\n1", "3"),
        ({"question": "2+2?", "answer": "4"}, "2+2?", "4"),
        ({"query": "2+2?", "response": "4", "original_question": "x"}, "2+2?", "4"),
        ({"prompt": "2+2?", "completion": "4"}, "2+2?", "4"),
        ({"problem": "2+2?", "solution": "4"}, "2+2?", "4"),
        ({"prompt": "2+2?", "response": "4", "images": [], "tools": None, "weight": 1.0}, "2+2?", "4"),
    ],
)
def test_common_column_pairs_are_read_without_options(
    row: dict[str, Any], prompt: str, response: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert learnt(row, tokenizer) == (f"{prompt}{response}<eos>", f"{response}<eos>")


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"prompt": "", "response": "a"}, ["'prompt'", "''", "data.prompt_key"]),
        ({"prompt": None, "response": "a"}, ["'prompt'", None]),
        ({"prompt": 3, "response": "a"}, ["'prompt'", 3]),
        ({"system": "S", "prompt": "a", "response": "b"}, ["'system'", "apply_chat_template=true", "ignored_columns"]),
        ({"tools": [TOOL], "prompt": "a", "response": "b"}, ["'tools'", "apply_chat_template=true"]),
        ({"prompt": "a", "response": "b", "history": [["c", "d"]]}, ["'history'", "data.ignored_columns=history"]),
        ({"prompt": "a", "response": "b", "images": ["a.png"]}, ["images", "data.ignored_columns=images"]),
        ({"prompt": "a", "response": "b", "weight": 0.5}, ["'weight'", "0.5", "data.ignored_columns=weight"]),
        ({"prompt": "a", "response": "b", "context": "c"}, ["'context'", "'c'", "data.ignored_columns=context"]),
        ({"prompt": "a", "response": "b", "messages": "no"}, ["'messages'"]),
        ({"question": "a", "answer": "b", "response": "c"}, ["'response'", "data.response_key=answer"]),
        ({"prompt": "a", "completion": "b", "label": False}, ["'label'", "data.ignored_columns=label"]),
        ({"text": "abc"}, ["'text'", "data.plain_text=true"]),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ["'chosen'", "data.response_key=chosen", "dpo"]),
        ({"prompt": [user("a")], "reward_model": {"ground_truth": "b"}}, ["'reward_model'", "data.response_key"]),
        ({"conversations": [{"from": "alien", "value": "a"}]}, ["'alien'", "human"]),
        ({"prompt": [user("a"), assistant("b")], "response": "c"}, ["assistant", "'b'"]),
    ],
)
def test_a_row_with_an_unread_column_is_refused_with_the_option_to_set(
    row: dict[str, Any], facts: list[object], tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        learnt(row, tokenizer)


@pytest.mark.parametrize("name", ["system", "tools", "history", "images", "weight", "context", "label"])
def test_a_column_can_be_ignored_by_name(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    values = {"system": "S", "tools": [TOOL], "weight": 0.5, "label": False}
    row = {"prompt": "a", "response": "b", name: values.get(name, ["x"])}
    assert learnt(row, tokenizer, ignored_columns=(name,)) == ("ab<eos>", "b<eos>")


def test_the_system_column_is_the_first_message_and_is_not_repeated(tokenizer: PreTrainedTokenizerFast) -> None:
    expected = ("<system>S\n<user>a\n<assistant>b<eos>", "b<eos>")
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    system = {"role": "system", "content": "S"}
    assert learnt({"system_prompt": "S", "question": "a", "response": "b"}, tokenizer, apply_chat_template=True) == (
        expected
    )
    assert learnt({"system": "S", "conversations": turns}, tokenizer) == expected
    assert learnt({"conversations": [{"from": "system", "value": "S"}, *turns]}, tokenizer) == expected
    assert learnt({"system": "S", "messages": [system, user("a"), assistant("b")]}, tokenizer) == expected
    with pytest.raises(ValueError, match=says("'T'", "'S'", "data.ignored_columns")):
        learnt({"system": "T", "messages": [system, user("a"), assistant("b")]}, tokenizer)


def test_messages_have_precedence_over_columns_that_repeat_them(tokenizer: PreTrainedTokenizerFast) -> None:
    row = {"prompt": "a", "messages": [user("a"), assistant("b")]}
    assert learnt(row, tokenizer)[0] == "<user>a\n<assistant>b<eos>"
    with pytest.raises(ValueError, match=says("'prompt'", "'other'", "data.prompt_key=messages")):
        learnt(row | {"prompt": "other"}, tokenizer)


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}])
def test_tools_are_rendered_and_calls_are_json_encoded_once(
    tools: Any, arguments: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    call = CALL | {"function": {"name": "weather", "arguments": arguments}}
    row = {"messages": [user("?"), assistant("", tool_calls=[call]), {"role": "tool", "content": "x"}], "tools": tools}
    text, response = learnt(row, tokenizer)
    assert text.startswith(f"[{json.dumps(TOOL)}]\n<user>?\n<assistant>")
    assert response == '{"name": "weather", "arguments": {"city": "Rome"}}<eos>'
    # OpenAI omits the content of a turn that only calls tools.
    row["messages"][1] = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert learnt(row, tokenizer) == (text, response)


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        ({"name": "f", "arguments": "{bad"}, ["'f'", "not valid JSON", "{bad"]),
        ({"name": "f", "arguments": "[1]"}, ["'f'", "JSON object", "[1]"]),
        ({"arguments": "{}"}, ["no name"]),
        ("{bad", ["'tool_calls'", "not valid JSON"]),
    ],
)
def test_a_tool_call_that_cannot_be_parsed_raises_an_error_with_its_row(
    call: Any, facts: list[str], tmp_path: Path
) -> None:
    turn = assistant("", tool_calls=call if isinstance(call, str) else [{"type": "function", "function": call}])
    path = write(tmp_path / "rows.jsonl", {"messages": [user("?"), assistant("a")]}, {"messages": [user("?"), turn]})
    with pytest.raises(ValueError, match=says("row 1", *facts)):
        load_demonstrations(path)
    prompts = write(tmp_path / "prompts.jsonl", {"input": "a"}, {"input": [user("?"), turn, user("!")]})
    with pytest.raises(ValueError, match=says("row 1", *facts)):
        load_rows(prompts)


def test_tool_calls_of_sharegpt_and_of_older_clients_are_recognised(tokenizer: PreTrainedTokenizerFast) -> None:
    expected = '{"name": "f", "arguments": {"a": 1}}<eos>'
    share = [
        {"from": "human", "value": "?"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
    ]
    older = [user("?"), {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a": 1}'}}]
    assert learnt({"conversations": share}, tokenizer)[1] == expected
    assert learnt({"messages": older}, tokenizer)[1] == expected


def test_tools_that_the_template_omits_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    silent = character_tokenizer(string.printable)
    silent.chat_template = CHAT.replace("{{ tools | tojson }}\n", "")
    facts = says("row 0", "tools", "model.chat_template", "data.ignored_columns=tools")
    row = {"messages": [user("?"), assistant("a")], "tools": [TOOL]}
    with pytest.raises(ValueError, match=facts):
        learnt(row, silent)
    pair = {"prompt": [user("?")], "chosen": "a", "rejected": "b", "tools": [TOOL]}
    with pytest.raises(ValueError, match=facts):
        read_pairs([pair], PairFormat(), silent)
    with pytest.raises(ValueError, match=facts):
        PromptSource([{"input": [user("?")], "label": "", "tools": [TOOL]}], silent, 0)
    (read,) = read_pairs([pair], PairFormat(), tokenizer)
    assert read.prompt == f"[{json.dumps(TOOL)}]\n<user>?\n<assistant>"


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_a_message_with_weight_0_is_context_and_not_trained_on(
    mark: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> None:
    messages = [user("a"), assistant("b", **mark), user("c"), assistant("d", weight=1)]
    assert learnt({"messages": messages}, tokenizer) == (
        "<user>a\n<assistant>b<eos>\n<user>c\n<assistant>d<eos>",
        "d<eos>",
    )
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", **mark}, {"from": "gpt", "value": "c"}]
    assert learnt({"conversations": turns}, tokenizer)[1] == "c<eos>"
    pair = {"chosen": [user("a"), assistant("b", **mark)], "rejected": [user("a"), assistant("c")]}
    with pytest.raises(ValueError, match=says("weight", "train")):
        read_pairs([pair], PairFormat(), tokenizer)


@pytest.mark.parametrize(
    "message", [assistant("b", weight=0.5), user("b") | {"weight": 1}, user("b") | {"train": True}]
)
def test_an_unsupported_message_weight_is_refused(message: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=says("row 0", message["role"])):
        learnt({"messages": [user("a"), message, assistant("c")]}, tokenizer)


SYSTEM = {"role": "system", "content": "S"}
WITH_SYSTEM = "<system>S\n<user>a\n<assistant>"
WITHOUT = "<user>a\n<assistant>"


@pytest.mark.parametrize(
    ("row", "form", "prompt"),
    [
        ({"prompt": "a?", "chosen": "b", "rejected": "c"}, {}, "a?"),
        ({"question": "a?", "chosen": "b", "rejected": "c"}, {}, "a?"),
        ({"instruction": "a", "input": "d", "chosen": "b", "rejected": "c"}, {}, "a\n\nd"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"apply_chat_template": True}, WITHOUT),
        ({"prompt": [user("a")], "chosen": "b", "rejected": "c"}, {}, WITHOUT),
        ({"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]}, {}, WITHOUT),
        ({"prompt": "a", "chosen": [assistant("b")], "rejected": [assistant("c")]}, {}, WITHOUT),
        # The responses repeat the prompt, as text and as messages, one of them with the system prompt.
        ({"prompt": "a", "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}, {}, WITHOUT),
        (
            {"prompt": [user("a")], "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
            {},
            WITHOUT,
        ),
        (
            {
                "prompt": [SYSTEM, user("a")],
                "chosen": [user("a"), assistant("b")],
                "rejected": [user("a"), assistant("c")],
            },
            {},
            WITH_SYSTEM,
        ),
        (
            {
                "prompt": [user("a")],
                "chosen": [SYSTEM, user("a"), assistant("b")],
                "rejected": [SYSTEM, user("a"), assistant("c")],
            },
            {},
            WITH_SYSTEM,
        ),
        ({"prompt": [SYSTEM, user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]}, {}, WITH_SYSTEM),
        ({"system": "S", "question": "a", "chosen": "b", "rejected": "c"}, {"apply_chat_template": True}, WITH_SYSTEM),
        (
            {
                "conversations": [{"from": "human", "value": "a"}],
                "chosen": {"from": "gpt", "value": "b"},
                "rejected": {"from": "gpt", "value": "c"},
            },
            {},
            WITHOUT,
        ),
        (
            {
                "prompt": "a",
                "chosen": [user("a"), assistant("b")],
                "rejected": [user("a"), assistant("c")],
                "messages": [user("a"), assistant("b")],
                "score_chosen": 2.0,
                "margin": 1,
            },
            {},
            WITHOUT,
        ),
    ],
)
def test_the_prompt_of_a_preference_pair_is_not_repeated(
    row: dict[str, Any], form: dict[str, Any], prompt: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    (pair,) = read_pairs([row], PairFormat(**form), tokenizer)
    assert (pair.prompt, pair.chosen.strip(), pair.rejected.strip()) == (prompt, "b", "c")
    data = encode_pairs([pair], tokenizer, with_mask=True)
    tokens = data.batch.row(0, "tokens")
    mask = data.batch.row(0, "loss_mask")
    assert tokenizer.decode(tokens[mask]) == "b<eos>"
    assert tokenizer.decode(tokens[~mask]) == prompt


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"chosen_response": "a", "rejected_response": "b"}, ["chosen_key=chosen_response", "rejected_response"]),
        ({"prompt": "a", "response": "b"}, ["'chosen'", "sft"]),
        (
            {"prompt": "a", "chosen": [user("d"), assistant("b")], "rejected": [user("d"), assistant("c")]},
            ["'prompt'", "'a'", "data.ignored_columns=prompt"],
        ),
        ({"system": "S", "prompt": "a", "chosen": "b", "rejected": "c"}, ["'system'", "apply_chat_template"]),
        ({"tools": [TOOL], "prompt": "a", "chosen": "b", "rejected": "c"}, ["'tools'", "apply_chat_template"]),
        ({"prompt": "a", "question": "d", "chosen": "b", "rejected": "c"}, ["'question'", "data.prompt_key"]),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["x"]}, ["images", "data.ignored_columns"]),
        ({"prompt": [user("a"), assistant("d")], "chosen": "b", "rejected": "c"}, ["assistant", "'d'"]),
    ],
)
def test_a_pair_with_an_unread_column_is_refused_with_the_option_to_set(
    row: dict[str, Any], facts: list[str], tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match=says("row 0", *facts)):
        read_pairs([row], PairFormat(), tokenizer)


VERL = {"data_source": "s", "reward_model": {"ground_truth": "4"}}


def first_prompt(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, **options: Any) -> str:
    return PromptSource(rows, tokenizer, 0, shuffle=False, **options).first()[0]


@pytest.mark.parametrize("verl", [False, True])
def test_a_prompt_includes_tools_system_prompt_and_prefill(
    verl: bool, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    def read(**options: Any) -> str:
        row = {key: options.pop(key) for key in ("prompt", "tools", "system") if key in options}
        path = write(tmp_path / "rows.jsonl", row | (VERL if verl else {"answer": "4"}))
        rows = load_verl_rows([path]) if verl else load_rows(path, "prompt", "answer")
        assert rows[0]["label"] == "4"
        return first_prompt(rows, tokenizer, **options)

    assert read(prompt=[user("?")], tools=json.dumps([TOOL])) == f"[{json.dumps(TOOL)}]\n<user>?\n<assistant>"
    assert read(prompt=[user("?")], system="S") == "<system>S\n<user>?\n<assistant>"
    assert read(prompt="?", system="S", apply_chat_template=True) == "<system>S\n<user>?\n<assistant>"
    # The policy continues an unfinished turn, so there is no second turn and no end token.
    assert read(prompt=[user("?"), assistant("It is")]) == "<user>?\n<assistant>It is"
    calls = [user("?"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "x"}]
    assert read(prompt=calls).endswith('{"name": "weather", "arguments": {"city": "Rome"}}<eos>\n<tool>x\n<assistant>')
    for name, options in (("tools", {"tools": [TOOL]}), ("system", {"system": "S"})):
        with pytest.raises(ValueError, match=says("row 0", name, "apply_chat_template=true", "ignored_columns")):
            read(prompt="?", **options)


@pytest.mark.parametrize("prompt", [[], [SYSTEM], "", " \n", [user("")]])
def test_a_prompt_without_a_user_message_is_refused(prompt: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"input": "a", **VERL, "prompt": "a"}, {"input": prompt, **VERL})
    with pytest.raises(ValueError, match=says(path, "row 1", "'input'")):
        load_rows(path, ignored=("prompt",))
    with pytest.raises(ValueError, match=says(path, "row 1", "'input'")):
        load_verl_rows([path], prompt_key="input")


def test_prompts_that_end_with_a_prefill_are_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"input": [user("a"), assistant("b")], "label": ""}, {"input": "a", "label": ""}]
    assert PromptSource(rows, tokenizer, 0).prefilled == 1


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"instruction": "Add", "input": "1 2", "output": "3"}, ["'instruction'", "data.prompt_key=instruction"]),
        ({"instruction": "Add", "input": "", "output": "3"}, ["'instruction'", "data.prompt_key=instruction"]),
        ({"prompt": "a", "input": "b"}, ["'prompt'", "data.prompt_key=prompt"]),
        ({"input": "a", "images": ["x.png"]}, ["images", "data.ignored_columns=images"]),
        ({"input": "a", "history": [["b", "c"]]}, ["'history'", "data.ignored_columns=history"]),
        ({"prompt": "a", **VERL}, ["data.prompt_key=prompt", "data.label_key=reward_model.ground_truth"]),
        ({"question": "a", "answer": "b"}, ["data.prompt_key=question", "data.label_key=answer"]),
        ({"messages": [user("a")], "solution": "b"}, ["data.prompt_key=messages", "data.label_key=solution"]),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ["data.prompt_key=prompt"]),
    ],
)
def test_rows_in_another_format_are_refused_with_the_option_to_set(
    row: dict[str, Any], facts: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", row)
    with pytest.raises(ValueError, match=says(path, "row 0", *facts)):
        load_rows(path)


def test_an_instruction_and_its_input_form_a_prompt(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"instruction": "Add", "input": "1 2", "output": "3"})
    assert load_rows(path, "instruction", "output")[0]["input"] == "Add\n\n1 2"
    assert load_rows(path, "instruction", "output", ignored=("input",))[0]["input"] == "Add"


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        (
            {"question": "a", "answer": "b"},
            ["data.prompt_key=question", "'data_source'", "'answer'", "label_key=answer"],
        ),
        ({"prompt": "a", "source": "x", "answer": "b"}, ["data.reward_fn_key=source", "'ground_truth'", "'answer'"]),
        ({"prompt": "a", "data_source": "x", "label": "b"}, ["reward_model.ground_truth", "the value of 'label'"]),
    ],
)
def test_rows_not_in_verls_format_are_refused_with_the_option_to_set(
    row: dict[str, Any], facts: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", row)
    with pytest.raises(ValueError, match=says(path, "row 0", "recipes/grpo", *facts)):
        load_verl_rows([path])


def test_used_and_unused_columns_are_listed(tmp_path: Path) -> None:
    rows = [{"instruction": "a", "input": text, "output": "b", "id": 1, "note": ""} for text in ("", "c")]
    lines: list[str] = []
    load_demonstrations(write(tmp_path / "rows.jsonl", *rows), info=lines.append)
    assert lines[0].endswith("columns used: instruction, output, input; not used: id, note (empty)")


def test_an_example_is_shown_with_marks_around_trained_text(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"messages": [user("a" * 1000), assistant("b"), user("c"), assistant("d")]}]
    shown = encode_demonstrations(rows, tokenizer).describe_first(tokenizer)
    assert "[[learnt]]'b<eos>'[[/learnt]]'\\n<user>c\\n<assistant>'[[learnt]]'d<eos>'[[/learnt]]; token ids" in shown
    # 6 + 1,000 + 12 characters precede the first response. The first 300 and the last 60 of them are shown.
    assert "(658 characters left out)" in shown
    assert "learnt are 4: 1018 to 1019, 1040 to 1041" in shown
    pairs = read_pairs([{"prompt": "a?", "chosen": "b", "rejected": "c"}], PairFormat(), tokenizer)
    chosen, rejected = encode_pairs(pairs, tokenizer, with_mask=True).describe_first(tokenizer)
    assert "chosen" in chosen
    assert "'a?'[[learnt]]'b<eos>'[[/learnt]]" in chosen
    assert "'a?'[[learnt]]'c<eos>'[[/learnt]]" in rejected
