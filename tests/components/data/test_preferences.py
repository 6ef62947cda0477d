"""Preference pairs: reading of rows, tokenization, and the held-out split."""

import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from components.batch import Batch
from components.data.pair_rows import ANSWER_MARK
from components.data.preferences import (
    Pair,
    PairFormat,
    encode_pairs,
    hold_out,
    load_pairs,
    read_pairs,
    scored_tokens,
    select_pairs,
)
from components.data.records import read_records
from components.data.shares import check_shares
from components.data.text import TextEncoder
from plugins.demo.tiny_model import character_tokenizer, learnt_tokenizer
from tests.components.data.test_text import ADDS_BOS
from tests.components.helpers.word_tokenizers import BOS, EOS, NO, YES, word_tokenizer
from tests.hh_rlhf_rows import FILE, hh_rlhf_file
from tests.messages import says

TURNS = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}{% if m['role'] == 'assistant' %}"
    "{{ eos_token }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with a token per character, and a template that writes roles."""
    tokenizer = character_tokenizer(string.ascii_letters + "\n :.?![]<>/")
    tokenizer.chat_template = TURNS
    return tokenizer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast, **form: Any) -> Pair:
    (pair,) = read_pairs([row], PairFormat(**form), tokenizer)
    return pair


def parts(pair: Pair) -> tuple[str, str, str]:
    return pair.prompt, pair.chosen, pair.rejected


DIALOGUE = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Who?\n\nAssistant:"


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        # One turn and several turns. A common beginning of both responses still belongs to the responses.
        ("\n\nHuman: Hi\n\nAssistant: You too", "\n\nHuman: Hi\n\nAssistant: You", "\n\nHuman: Hi\n\nAssistant:"),
        (DIALOGUE + " Me", DIALOGUE + " I", DIALOGUE),
        # The conversations diverge in an earlier turn: both responses start after the last common mark.
        (
            "\n\nHuman: Hi\n\nAssistant: Yes\n\nHuman: a\n\nAssistant: b",
            "\n\nHuman: Hi\n\nAssistant: No\n\nHuman: a\n\nAssistant: b",
            "\n\nHuman: Hi\n\nAssistant:",
        ),
        (DIALOGUE + " Me", DIALOGUE, DIALOGUE),
        # Plain text: the prompt consists of the common whole words.
        ("who is it? me", "who is it? myself", "who is it?"),
        ("who\nis", "who\nam", "who"),
        ("yes", "yet", ""),
        ("yes", "no", ""),
    ],
)
def test_the_prompt_of_two_texts_ends_at_the_last_common_mark_or_blank(
    letters: PreTrainedTokenizerFast, chosen: str, rejected: str, prompt: str
) -> None:
    pair = read({"chosen": chosen, "rejected": rejected}, letters)
    assert parts(pair) == (prompt, chosen[len(prompt) :], rejected[len(prompt) :])


def test_a_prompt_column_precedes_both_responses(letters: PreTrainedTokenizerFast) -> None:
    row = {"ask": "who?", "good": "me", "bad": "you", "margin": 2}
    keys: dict[str, Any] = {"prompt_key": "ask", "chosen_key": "good", "rejected_key": "bad"}
    assert read(row, letters, **keys).margin == 0.0
    keys["with_margin"] = True
    assert read(row, letters, **keys) == Pair("who?", "me", "you", 2.0, "who?")
    assert read(row, letters, **keys, input_template="Human: {}\n") == Pair("Human: who?\n", "me", "you", 2.0, "who?")
    # The end token of the template is removed, because encoding adds one.
    assert read(row, letters, **keys, apply_chat_template=True) == Pair("[u]who?[a]", "me", "you", 2.0, "who?")


def test_messages_are_rendered_with_and_without_a_prompt_column(letters: PreTrainedTokenizerFast) -> None:
    before = [user("Hi"), assistant("Yes"), user("Who?")]
    good = [assistant("me")]
    bad = [assistant("you")]
    expected = ("[u]Hi[a]Yes<eos>\n[u]Who?[a]", "me", "you")
    pairs = [
        read({"prompt": before, "chosen": good, "rejected": bad}, letters, prompt_key="prompt"),
        read({"chosen": before + good, "rejected": before + bad}, letters),
        # As in some data sets, the responses repeat the prompt.
        read({"prompt": before, "chosen": before + good, "rejected": before + bad}, letters, prompt_key="prompt"),
        read({"prompt": before, "chosen": "me", "rejected": "you"}, letters, prompt_key="prompt"),
    ]
    assert [parts(pair) for pair in pairs] == [expected] * 4
    assert {pair.opening for pair in pairs} == {"Hi"}
    said = read({"prompt": "Hi", "chosen": good, "rejected": bad}, letters, prompt_key="prompt")
    assert parts(said) == ("[u]Hi[a]", "me", "you")


def test_the_prompt_of_diverging_conversations_ends_before_the_last_common_response(
    letters: PreTrainedTokenizerFast,
) -> None:
    start = [user("Hi"), assistant("Yes")]
    # The conversations diverge in a user message, so both responses begin with the common assistant message before it.
    pair = read(
        {"chosen": [*start, user("a"), assistant("b")], "rejected": [*start, user("c"), assistant("d")]}, letters
    )
    assert parts(pair) == ("[u]Hi[a]", "Yes<eos>\n[u]a[a]b", "Yes<eos>\n[u]c[a]d")
    # Both are identical: the last message is the response. The pair is dropped later.
    pair = read({"chosen": start, "rejected": start}, letters)
    assert parts(pair) == ("[u]Hi[a]", "Yes", "Yes")
    # They have nothing in common.
    pair = read({"chosen": [assistant("a")], "rejected": [assistant("b")]}, letters)
    assert parts(pair) == ("", "[a]a", "[a]b")


def test_the_opening_of_a_conversation_is_the_first_message_of_the_user(letters: PreTrainedTokenizerFast) -> None:
    system = {"role": "system", "content": "Be kind"}
    row = {"chosen": [system, user("Hi"), assistant("a")], "rejected": [system, user("Hi"), assistant("b")]}
    assert read(row, letters).opening == "Hi"
    row = {"chosen": DIALOGUE + " a", "rejected": DIALOGUE + " b"}
    assert read(row, letters).opening == "\n\nHuman: Hi"
    row = {"prompt": DIALOGUE, "chosen": "a", "rejected": "b"}
    assert read(row, letters, prompt_key="prompt").opening == "\n\nHuman: Hi"
    assert read({"chosen": "yes", "rejected": "no"}, letters).opening == "yes"


@pytest.mark.parametrize("end", ["<eos>", "<eos>\n", " <eos> \n", "<eos><eos>", "<eos> <eos>\n\n"])
@pytest.mark.parametrize("with_mask", [False, True])
def test_every_response_ends_with_exactly_one_end_token(
    letters: PreTrainedTokenizerFast, end: str, with_mask: bool
) -> None:
    rows = [
        {"prompt": "ab", "chosen": "c" + end, "rejected": "d"},
        {"prompt": "ab", "chosen": "c", "rejected": "d" + end},
    ]
    data = encode_pairs(read_pairs(rows, PairFormat(prompt_key="prompt"), letters), letters, with_mask=with_mask)
    a, b, c, d = letters("abcd")["input_ids"]
    eos = letters.eos_token_id
    blank = [letters(" ")["input_ids"][0]] * end.startswith(" ")
    assert data.batch.lists("tokens") == [
        [a, b, c, *blank, eos],
        [a, b, d, eos],
        [a, b, c, eos],
        [a, b, d, *blank, eos],
    ]


def test_scoring_and_training_encode_a_text_identically(letters: PreTrainedTokenizerFast) -> None:
    row = {"prompt": [user("Hi"), assistant("Yes"), user("Who?")], "chosen": "me", "rejected": "you"}
    pairs = read_pairs([row], PairFormat(prompt_key="prompt"), letters)
    trained = encode_pairs(pairs, letters).batch.lists("tokens")
    encoder = TextEncoder(letters)
    for text in ("[u]Hi[a]Yes<eos>\n[u]Who?[a]me", "[u]Hi[a]Yes<eos>\n[u]Who?[a]me<eos>\n"):
        assert scored_tokens(text, encoder) == trained[0]


def test_the_mask_covers_responses_and_end_tokens_and_prompts_equal_those_of_generation() -> None:
    tokenizer = word_tokenizer(ADDS_BOS)
    rows = [{"prompt": "no yes", "chosen": "yes", "rejected": "no no"}]
    pairs = read_pairs(rows, PairFormat(prompt_key="prompt"), tokenizer)
    batch = encode_pairs(pairs, tokenizer, with_mask=True).batch
    # Prompt and response are tokenized separately. Joined they would contain "yesyes", which is not a token here.
    assert batch.lists("tokens") == [[BOS, NO, YES, YES, EOS], [BOS, NO, YES, NO, NO, EOS]]
    assert batch.lists("loss_mask") == [[False] * 3 + [True] * 2, [False] * 3 + [True] * 3]
    at_once = encode_pairs(pairs, tokenizer).batch
    assert at_once.lists("tokens") == [[BOS, NO, 0, EOS], [BOS, NO, 0, NO, EOS]]
    assert "loss_mask" not in at_once


def test_unusable_pairs_are_dropped_and_counted(letters: PreTrainedTokenizerFast) -> None:
    rows = [
        {"prompt": "ab", "chosen": "cde", "rejected": "c"},  # 6 tokens with the end token both responses are identical
        {"prompt": "ab", "chosen": "c", "rejected": "cdef"},  # 7
        {"prompt": "ab", "chosen": "c<eos>", "rejected": "c"},  # identical
        {"prompt": "ab", "chosen": "c", "rejected": "d", "margin": 0.5},
        # a repetition of the first pair the reversed pair, which is another pair
        {"prompt": "ab", "chosen": "cde", "rejected": "c", "margin": 1},
        {"prompt": "ab", "chosen": "c", "rejected": "cde"},  # the other way round it is another
    ]
    form = PairFormat(prompt_key="prompt", with_margin=True)
    pairs = read_pairs([{"margin": 0} | row for row in rows], form, letters)
    data = encode_pairs(pairs, letters, max_tokens=6)
    assert (len(data), data.dropped, data.repeated) == (4, {"too_long": 1, "identical": 1}, 1)
    assert data.batch["row"].tolist() == [0, 0, 3, 3, 4, 4, 5, 5]
    assert data.batch["margin"].tolist() == [0, 0, 0.5, 0.5, 1, 1, 0, 0]
    assert data.batch.lengths.tolist() == [6, 4, 4, 4, 6, 4, 4, 6]
    assert data.openings == ["ab"] * 4
    with pytest.raises(ValueError, match=says("6 pairs", "'too_long': 5", "'identical': 1", "data.max_tokens")):
        encode_pairs(pairs, letters, max_tokens=3)


@pytest.mark.parametrize(
    ("row", "form", "facts"),
    [
        ({"chosen": "a"}, {}, ["'rejected'", "['chosen']", "rejected_key"]),
        ({"better": "a"}, {}, ["'chosen'", "['better']", "chosen_key"]),
        ({"chosen": 3, "rejected": "b"}, {}, ["'chosen'", "int", 3, "chosen_key"]),
        ({"chosen": "a", "rejected": []}, {}, ["'rejected'", "list", "length 0", "rejected_key"]),
        ({"chosen": "a", "rejected": ["b"]}, {}, ["'rejected'", "list", "length 1", "rejected_key"]),
        ({"chosen": "a", "rejected": None}, {}, ["'rejected'", "null", "rejected_key"]),
        ({"chosen": "a", "rejected": "b"}, {"prompt_key": "ask"}, ["'ask'", "prompt_key"]),
        ({"chosen": "a", "rejected": [user("b")]}, {}, ["'chosen'", "str", "'rejected'", "list"]),
        ({"chosen": "a", "rejected": "b"}, {"apply_chat_template": True}, ["apply_chat_template", "prompt_key"]),
        *(
            (
                {"chosen": "a", "rejected": "b", "margin": margin},
                {"with_margin": True},
                ["'margin'", repr(margin), "margin_loss"],
            )
            for margin in (float("nan"), float("inf"), "one", "nan", True, None, [1])
        ),
    ],
)
def test_a_row_without_a_pair_is_refused_with_its_number_and_the_option_to_set(
    letters: PreTrainedTokenizerFast, row: dict[str, Any], form: dict[str, Any], facts: list[object]
) -> None:
    good = {"ask": "", "margin": 1, "chosen": [assistant("a")], "rejected": [assistant("b")]}
    with pytest.raises(ValueError, match=says("row 1", *facts)):
        read_pairs([good, row], PairFormat(**form), letters)


def test_a_missing_or_unsuitable_template_is_refused() -> None:
    rows = [{"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}]
    tokenizer = character_tokenizer("abc")
    tokenizer.chat_template = "{% if add_generation_prompt %}b{% endif %}{{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match=says("row 0", "template", "response")):
        read_pairs(rows, PairFormat(), tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=says("row 0", "apply_chat_template")):
        read_pairs(rows, PairFormat(), tokenizer)
    tokenizer.eos_token = None
    pairs = read_pairs([{"chosen": "a", "rejected": "b"}], PairFormat(), tokenizer)
    with pytest.raises(ValueError, match="eos"):
        encode_pairs(pairs, tokenizer)


def test_pairs_of_a_task_and_of_a_file_are_limited_in_number(tmp_path: Path) -> None:
    assert load_pairs("task:sort", max_rows=20, seed=1) == load_pairs("task:sort", max_rows=30, seed=1)[:20]
    assert load_pairs("task:sort", max_rows=5, seed=1) != load_pairs("task:sort", max_rows=5, seed=2)
    (tmp_path / "pairs.jsonl").write_text('{"chosen": "a", "rejected": "b"}\n' * 3)
    assert [len(load_pairs(f"{tmp_path}/pairs.jsonl", max_rows=most)) for most in (2, None)] == [2, 3]


def test_pairs_of_a_task_have_fixed_columns() -> None:
    form = PairFormat(prompt_key="ask", chosen_key="good", apply_chat_template=True, with_margin=True)
    assert form.of("pairs.jsonl") is form
    assert form.of("task:sort") == PairFormat(prompt_key="prompt", apply_chat_template=True, with_margin=True)


SPELLINGS = ("{}", " {} ", "{}\n\n", "\t{}")


@given(
    names=st.lists(st.integers(0, 12), min_size=2, max_size=40),
    spelling=st.randoms(use_true_random=False),
    count=st.integers(0, 12),
    seed=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_no_conversation_is_in_both_splits_in_any_notation(
    names: list[int], spelling: Any, count: int, seed: int
) -> None:
    def written(name: int) -> str:
        words = f"what is {chr(97 + name)}{spelling.choice([' ', '  ', chr(10)])}for"
        return spelling.choice(SPELLINGS).format(spelling.choice([words, words.upper(), words.title()]))

    openings = [written(name) for name in names]
    try:
        train_P, held_P = hold_out(openings, count, seed)
    except ValueError as error:
        assert re.search(says(count, "evaluation.held_out"), str(error))
        # Groups are never split, so the last one may exceed the number. Without it there are too few pairs.
        sizes = sorted(names.count(name) for name in set(names))
        assert len(names) - sizes[-1] < count
        return
    assert sorted([*train_P.tolist(), *held_P.tolist()]) == list(range(len(names)))
    assert (train_P.dtype, held_P.dtype) == (torch.int64, torch.int64)
    assert train_P.tolist() == sorted(train_P.tolist())
    assert held_P.tolist() == sorted(held_P.tolist())
    assert not {names[i] for i in train_P.tolist()} & {names[i] for i in held_P.tolist()}
    assert len(train_P) > 0
    # At least the requested number, and fewer without the last conversation.
    assert count <= len(held_P) < count + max(names.count(name) for name in names)
    again = hold_out(openings, count, seed)
    assert again[0].equal(train_P)
    assert again[1].equal(held_P)


def test_the_seed_selects_the_held_out_conversations_and_holding_out_all_is_refused() -> None:
    openings = [str(i) for i in range(100)]
    assert not hold_out(openings, 10, 1)[1].equal(hold_out(openings, 10, 2)[1])
    with pytest.raises(ValueError, match=says("100 of 100", "evaluation.held_out")):
        hold_out(openings, 100, 0)
    with pytest.raises(ValueError, match=says("1 of 3", "evaluation.held_out")):
        hold_out(["Hi", "hi ", "HI"], 1, 0)


def test_selecting_pairs_keeps_both_responses(letters: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "a", "chosen": letter, "rejected": letter.upper()} for letter in "bcd"]
    batch = encode_pairs(read_pairs(rows, PairFormat(prompt_key="prompt"), letters), letters).batch
    actual = select_pairs(batch, torch.tensor([2, 0]))
    assert [letters.decode(ids[1:2]) for ids in actual.lists("tokens")] == ["d", "D", "b", "B"]
    assert len(select_pairs(batch, torch.tensor([], dtype=torch.int64))) == 0


def test_fewer_evaluation_pairs_than_ranks_are_refused() -> None:
    pairs = [Batch.from_rows({"tokens": [[1, 2], [3]] * count}) for count in range(4)]
    check_shares(3, pairs[2], None)
    check_shares(2, pairs[1], pairs[1])
    with pytest.raises(ValueError, match=says("2 responses", "evaluate", "3 ranks", "evaluation.held_out")):
        check_shares(3, pairs[3], pairs[1])
    with pytest.raises(ValueError, match=says("2 responses", "train", "3 ranks", "placement.ranks_per_node")):
        check_shares(3, pairs[1], None)


def test_hh_rlhf_is_read_without_options(tmp_path: Path) -> None:
    path = hh_rlhf_file(tmp_path)
    rows = read_records(path)
    assert (len(rows) == 2312) == (path == FILE)
    tokenizer = learnt_tokenizer((row["chosen"] for row in rows[:150]), size=500)
    pairs = read_pairs(rows, PairFormat(), tokenizer)
    for row, pair in zip(rows, pairs, strict=True):
        assert (pair.prompt + pair.chosen, pair.prompt + pair.rejected) == (row["chosen"], row["rejected"])
        assert pair.prompt.endswith(ANSWER_MARK)
        assert pair.opening.startswith("\n\nHuman:")
        assert ANSWER_MARK not in pair.opening
    # Dialogues of up to twelve turns. Dialogues with the same beginning are in the same split.
    assert max(pair.prompt.count(ANSWER_MARK) for pair in pairs) > 5
    openings = [pair.opening for pair in pairs]
    train_P, held_P = hold_out(openings, len(rows) // 10, seed=1)
    alike = [{" ".join(openings[i].lower().split()) for i in side.tolist()} for side in (train_P, held_P)]
    assert not alike[0] & alike[1]
    assert len(alike[0]) + len(alike[1]) < len(rows)
    data = encode_pairs(pairs[:200], tokenizer, max_tokens=400)
    assert data.dropped["too_long"] > 0
    assert len(data) + sum(data.dropped.values()) == 200
    kept = data.batch["row"][::2].tolist()
    for sequence in range(0, 40, 2):
        ids = data.batch.row(sequence, "tokens").tolist()
        assert tokenizer.decode(ids) == rows[kept[sequence // 2]]["chosen"] + tokenizer.eos_token
