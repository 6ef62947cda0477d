"""Loading of tokenizers, rendering of prompts, and encoding with exactly one BOS token."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from components.data.padding import pad_apart_from_end
from components.data.prompts import PromptSource
from components.data.supervised import DemonstrationFormat, encode_demonstrations
from components.data.text import TextEncoder, load_tokenizer, render_prompt, same_vocabulary
from plugins.demo.tiny_model import character_tokenizer
from tests.components.helpers.word_tokenizers import BOS, EOS, NO, YES, word_tokenizer
from tests.messages import says

TURNS = (
    "{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
BOS_AND_TURNS = "{{ bos_token }}" + TURNS
ADDS_BOS = "<s> $A"
ADDS_BOTH = "<s> $A </s>"
ADDS_EOS = "$A </s>"
ADDS_NOTHING = "$A"


@pytest.mark.parametrize(
    ("adds", "text", "ids"),
    [
        (ADDS_BOS, "no yes", [BOS, NO, YES]),
        (ADDS_BOS, "<s> no yes", [BOS, NO, YES]),
        (ADDS_BOS, "", [BOS]),
        (ADDS_BOTH, "no yes", [BOS, NO, YES]),
        (ADDS_EOS, "no yes", [NO, YES]),
        (ADDS_NOTHING, "no yes", [NO, YES]),
        (ADDS_NOTHING, "<s> no yes", [BOS, NO, YES]),
        (ADDS_NOTHING, "no <s> <s>", [NO, BOS, BOS]),
    ],
)
def test_a_prompt_has_the_bos_of_its_tokenizer_once_and_no_end_token(adds: str, text: str, ids: list[int]) -> None:
    assert TextEncoder(word_tokenizer(adds)).encode_prompt(text) == ids


def test_a_tokenizer_whose_bos_is_its_end_token_does_not_count_as_adding_a_bos() -> None:
    both = word_tokenizer("$A </s>", bos_token="</s>")
    assert TextEncoder(both).encode_prompt("no yes") == [NO, YES]
    assert TextEncoder(word_tokenizer("</s> $A", bos_token="</s>")).encode_prompt("no yes") == [EOS, NO, YES]


def test_a_tokenizer_of_characters_gets_no_bos() -> None:
    assert TextEncoder(character_tokenizer("ab")).encode_prompt("ab") == [3, 4]
    assert TextEncoder(character_tokenizer("ab")).encode_prompt("<bos>ab") == [1, 3, 4]


@pytest.mark.parametrize("adds", [ADDS_BOS, ADDS_NOTHING])
def test_two_bos_tokens_raise_an_error_with_their_possible_origins(adds: str) -> None:
    tokenizer = word_tokenizer(adds, BOS_AND_TURNS)
    with pytest.raises(ValueError, match=says("row 1", "'<s>'", "<s> no")):
        PromptSource([row("no"), row("<s> no")], tokenizer, 0, apply_chat_template=True)
    with pytest.raises(ValueError, match=says("'<s>'", "<s> <s> no")):
        TextEncoder(tokenizer).encode_prompt("<s> <s> no")


def row(text: str) -> dict[str, Any]:
    return {"input": text, "label": "", "datasource": "default"}


@pytest.mark.parametrize("adds", [ADDS_BOS, ADDS_BOTH, ADDS_EOS, ADDS_NOTHING])
@pytest.mark.parametrize("template", [TURNS, BOS_AND_TURNS])
@pytest.mark.parametrize("chat", [False, True])
def test_rl_and_sft_encode_a_prompt_to_the_same_ids(adds: str, template: str, chat: bool) -> None:
    tokenizer = word_tokenizer(adds, template)
    prompt = PromptSource([row("no yes")], tokenizer, 0, apply_chat_template=chat).take(1)["tokens"].tolist()
    has_bos = adds in (ADDS_BOS, ADDS_BOTH) or (chat and template == BOS_AND_TURNS)
    assert prompt == [BOS] * has_bos + [NO, YES]
    data = encode_demonstrations(
        [{"prompt": "no yes", "response": "yes"}], tokenizer, DemonstrationFormat(apply_chat_template=chat)
    )
    assert data.batch["tokens"].tolist() == [*prompt, YES, EOS]
    assert data.batch["loss_mask"].tolist() == [False] * len(prompt) + [True, True]


@pytest.mark.parametrize("adds", [ADDS_BOS, ADDS_NOTHING])
def test_a_conversation_that_begins_with_the_assistant_has_one_bos(adds: str) -> None:
    rows = [{"messages": [{"role": "assistant", "content": "no"}]}]
    data = encode_demonstrations(rows, word_tokenizer(adds, BOS_AND_TURNS))
    assert data.batch["tokens"].tolist() == [BOS, NO, EOS]


def test_batched_encoding_equals_single_encoding_and_errors_name_the_row() -> None:
    encoder = TextEncoder(word_tokenizer(ADDS_BOS))
    texts = ["no", "<s> yes", "yes no yes"]
    assert encoder.encode_prompts(texts, [7, 8, 9]) == [encoder.encode_prompt(text) for text in texts]
    with pytest.raises(ValueError, match=says("row 9", "'c'")):
        TextEncoder(character_tokenizer("ab")).encode_prompts(["a", "cb"], [8, 9])


def test_chat_messages_and_the_chat_option_use_the_template() -> None:
    tokenizer = character_tokenizer("abc")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert render_prompt(turns, tokenizer) == "ab<eos>c"
    assert render_prompt("ab", tokenizer, apply_chat_template=True) == "ab"
    with pytest.raises(ValueError, match="input_template"):
        render_prompt("ab", tokenizer, apply_chat_template=True, input_template="{}")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="apply_chat_template"):
        render_prompt(turns, tokenizer)


@pytest.mark.parametrize(
    ("special", "chosen"),
    [
        ({"pad_token": "no"}, None),  # the tokenizer has its own padding token: nothing is changed
        ({"pad_token": "</s>"}, "<s>"),
        ({}, "<s>"),
        ({"bos_token": "</s>"}, "<unk>"),
    ],
)
def test_the_padding_token_does_not_end_a_response(special: dict[str, str], chosen: str | None) -> None:
    tokenizer = word_tokenizer(**special)
    before = tokenizer.pad_token
    assert pad_apart_from_end(tokenizer) == chosen
    assert tokenizer.pad_token == (chosen or before)
    assert tokenizer.pad_token_id is not None
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert len(tokenizer) == 5  # no token was added, because the model would have no embedding for it


def test_if_only_the_end_token_is_special_padding_is_a_piece_that_no_text_contains(tmp_path: Path) -> None:
    texts = ["wow!!! the end", "the the end Ø ö", "an end  of  it"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learning = trainers.BpeTrainer(vocab_size=280, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    backend.train_from_iterator(texts, learning)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    before = tokenizer(texts)["input_ids"]
    chosen = pad_apart_from_end(tokenizer)
    assert chosen is not None and chosen[0] == "Ġ"
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.pad_token == chosen
    assert again(texts)["input_ids"] == before


def test_a_tokenizer_without_a_token_for_padding_raises_an_error() -> None:
    with pytest.raises(ValueError, match="pad_token"):
        pad_apart_from_end(word_tokenizer(bos_token="</s>", unk_token="</s>"))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system turn') }}", "no system turn"),
        # Messages of Python itself.
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
    ],
)
def test_an_exception_of_a_template_becomes_an_error_with_its_reason(template: str, reason: str) -> None:
    tokenizer = word_tokenizer(template=template)
    with pytest.raises(ValueError, match=says("'no yes'", reason)):
        render_prompt("no yes", tokenizer, apply_chat_template=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with an end token, but without padding token and chat template."""
    path = tmp_path_factory.mktemp("tokenizer")
    word_tokenizer(ADDS_BOS).save_pretrained(path)
    return path


def test_a_tokenizer_is_loaded_with_the_configured_pad_token_and_template(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder, pad_token="</s>", chat_template=TURNS)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (EOS, EOS, 5)
    assert TextEncoder(tokenizer).encode_prompt("no yes") == [BOS, NO, YES]
    assert render_prompt("no yes", tokenizer, apply_chat_template=True) == "no yes "
    (tmp_path / "template.jinja").write_text(BOS_AND_TURNS)
    tokenizer = load_tokenizer(folder, pad_token="<unk>", chat_template=str(tmp_path / "template.jinja"))
    assert tokenizer.pad_token_id == 0
    assert render_prompt("no yes", tokenizer, apply_chat_template=True) == "<s>no yes "


def test_templates_may_use_the_extra_tags_of_chat_templates(folder: Path) -> None:
    template = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% break %}{% endfor %}"
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(folder, pad_token="</s>", chat_template=template)
    assert render_prompt("no yes", tokenizer, apply_chat_template=True) == "no yes"


def test_a_bad_tokenizer_is_described_in_a_one_line_error(folder: Path, tmp_path: Path) -> None:
    def refused(path: Path, *facts: object, **options: Any) -> None:
        with pytest.raises(ValueError, match=says(*facts)) as caught:
            load_tokenizer(path, **options)
        assert "\n" not in str(caught.value)

    refused(tmp_path / "nothing", f"'{tmp_path}/nothing'")
    refused(tmp_path, f"'{tmp_path}'")
    refused(folder, f"'{folder}'", "pad_token='</s>'")
    assert load_tokenizer(folder, pad_with_end=True).pad_token_id == EOS
    refused(folder, f"'{folder}'", "pad_token='<pad>'", "pad_token='</s>'", pad_token="<pad>")
    refused(folder, f"'{folder}'", "pad_token='no yes'", "pad_token='</s>'", pad_token="no yes")
    refused(folder, "chat_template='nothing.jinja'", pad_token="no", chat_template="nothing.jinja")
    broken = "{% for m in messages %}\n{{ m['content' }}{% endfor %}"
    refused(folder, "chat_template", "Jinja", "line 2", pad_token="no", chat_template=broken)
    endless = word_tokenizer()
    endless.eos_token = None
    endless.save_pretrained(tmp_path / "endless")
    refused(tmp_path / "endless", f"'{tmp_path}/endless'", "eos_token", "tokenizer_config.json")


def test_vocabularies_are_equal_if_all_tokens_have_equal_ids() -> None:
    assert same_vocabulary(character_tokenizer("abc"), character_tokenizer("abc"))
    assert same_vocabulary(word_tokenizer(ADDS_BOS), word_tokenizer(ADDS_EOS, TURNS))
    assert not same_vocabulary(character_tokenizer("abc"), character_tokenizer("acb"))
    assert not same_vocabulary(character_tokenizer("abc"), character_tokenizer("abcd"))
