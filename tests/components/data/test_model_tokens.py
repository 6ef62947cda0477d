"""End tokens of responses, and tokens without an embedding in the model."""

import json
from pathlib import Path

import pytest

from components.data.model_tokens import embedding_rows, end_ids, turn_end_id
from components.data.preferences import PairFormat, encode_pairs, read_pairs
from components.data.supervised import encode_demonstrations
from components.data.text import TextEncoder, load_tokenizer, render_prompt
from tests.chat_models import CHATML, END_ID, THINK, THINK_ID, TURN_END, chat_model
from tests.messages import says

EOS_ID = 2


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, END_ID),
        (CHATML.replace("<|im_end|>\n", "{{ eos_token }}"), EOS_ID),
        (CHATML.replace("<|im_end|>\n", "<|im_end|>{{ eos_token }}"), None),  # more than one token
        (CHATML.replace("<|im_end|>\n", "</assistant>\n"), None),  # no token of its own
        ("{{ raise_exception('no') }}", None),
        (None, None),
    ],
)
def test_the_end_of_a_turn_is_a_single_special_token_after_it(
    template: str | None, expected: int | None, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(chat_model(tmp_path, template=template))
    assert turn_end_id(tokenizer) == expected
    expected_ids = [EOS_ID]
    if expected == END_ID:
        expected_ids.append(END_ID)
    assert end_ids(tokenizer) == expected_ids


def test_the_end_of_a_turn_depends_on_the_selected_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(chat_model(tmp_path, template=None))
    assert turn_end_id(tokenizer) is None
    tokenizer.chat_template = CHATML
    assert turn_end_id(tokenizer) == END_ID


def test_a_demonstration_is_trained_on_up_to_its_end_of_turn_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(chat_model(tmp_path))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    batch = encode_demonstrations([{"messages": turns}], tokenizer).batch
    learnt = batch["tokens"][batch["loss_mask"]].tolist()
    assert learnt == [*tokenizer("b")["input_ids"], END_ID]
    assert batch["tokens"][-1] == END_ID  # without the line break of the template, and without <eos>


def test_a_preference_pair_of_messages_ends_with_the_end_of_turn_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(chat_model(tmp_path))
    row = {
        name: [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
        for name, text in (("chosen", "b"), ("rejected", "c"))
    }
    pairs = read_pairs([row], PairFormat(), tokenizer)
    for with_mask in (False, True):
        rows = encode_pairs(pairs, tokenizer, with_mask=with_mask).batch.lists("tokens")
        assert [list(tokens).count(END_ID) for tokens in rows] == [2, 2]
        assert [tokens[-1] for tokens in rows] == [END_ID, END_ID]
        assert not any(EOS_ID in tokens for tokens in rows)
    plain = [{"prompt": "a ", "chosen": "b", "rejected": "c<eos>"}]
    pairs = read_pairs(plain, PairFormat(prompt_key="prompt"), tokenizer)
    assert [tokens[-2:] for tokens in encode_pairs(pairs, tokenizer).batch.lists("tokens")] == [
        [tokenizer("b")["input_ids"][0], EOS_ID],
        [tokenizer("c")["input_ids"][0], EOS_ID],
    ]


def test_a_text_with_a_token_id_beyond_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = chat_model(tmp_path, rows=THINK_ID)
    assert embedding_rows(folder) == THINK_ID
    # Token ids that no text uses are harmless.
    encoder = TextEncoder(load_tokenizer(folder))
    assert encoder.encode("a<|im_end|>")[-1] == END_ID
    for encode in (encoder.encode, encoder.encode_prompt):
        with pytest.raises(ValueError, match=says(THINK, f"id {THINK_ID}", f"{THINK_ID} rows", str(folder))):
            encode(f"a{THINK}")
    with pytest.raises(ValueError, match=says("row 9", THINK)):
        encoder.encode_prompts(["a", THINK], [8, 9])


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}"),
        CHATML.replace("<|im_start|>{{", "{% if m.role == 'tool' %}<think>{% endif %}<|im_start|>{{"),
        "{% if tools %}<think>{% endif %}" + CHATML,
    ],
    ids=["generation prompt", "tool role", "tools"],
)
def test_a_template_with_a_token_id_beyond_the_embedding_is_refused_when_it_is_applied(
    template: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(chat_model(tmp_path, template=template, rows=THINK_ID))
    assert render_prompt("a", tokenizer) == "a"  # without the template
    with pytest.raises(ValueError, match=says("chat template", THINK, f"{THINK_ID} rows")):
        render_prompt([{"role": "user", "content": "a"}], tokenizer)


@pytest.mark.parametrize("option", ["eos_token", "pad_token"])
def test_a_special_token_beyond_the_embedding_is_refused(option: str, tmp_path: Path) -> None:
    folder = chat_model(tmp_path, rows=END_ID)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {option: TURN_END}))
    with pytest.raises(ValueError, match=says(option, TURN_END, f"{END_ID} rows")):
        load_tokenizer(folder)


def test_token_ids_are_checked_against_the_model_that_reads_them(tmp_path: Path) -> None:
    whole = chat_model(tmp_path / "whole")
    short = chat_model(tmp_path / "short", rows=THINK_ID)
    assert TextEncoder(load_tokenizer(whole)).encode(THINK) == [THINK_ID]
    with pytest.raises(ValueError, match=says(THINK, str(short))):
        TextEncoder(load_tokenizer(whole, model_path=short)).encode(THINK)
