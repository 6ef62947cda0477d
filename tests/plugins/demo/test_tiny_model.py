"""Character and byte-pair tokenizers and the tiny model, created, saved and loaded."""

import hashlib
import json
import unicodedata
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from plugins.demo.tasks import SortTask, WordTask
from plugins.demo.tiny_model import character_tokenizer, learnt_tokenizer, task_tokenizer, tiny_model
from tests.messages import says

CHAT = [{"role": "user", "content": "ba>"}, {"role": "assistant", "content": "ab"}]


def test_every_character_is_one_token_after_pad_bos_and_eos() -> None:
    tokenizer = character_tokenizer("ab>")
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer("ba>")["input_ids"] == [4, 3, 5]
    assert len(tokenizer) == 6


@pytest.mark.parametrize("text", ["ab>", "b a\n", "", "  a", "ab<eos>", "7+5=12"])
def test_decoding_returns_the_original_text(text: str) -> None:
    tokenizer = character_tokenizer("ab> \n0123456789+=")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_can_be_left_out_of_the_text() -> None:
    assert character_tokenizer("ab").decode([3, 4, 2, 0], skip_special_tokens=True) == "ab"


def test_the_chat_template_closes_the_assistants_turns() -> None:
    tokenizer = character_tokenizer("ab>")
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "ba>ab<eos>"
    assert tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True) == "ba>"


def test_an_alphabet_with_repeated_or_non_ascii_letters_is_refused() -> None:
    with pytest.raises(ValueError, match=says("['a']")):
        character_tokenizer("aba")
    with pytest.raises(ValueError, match=says("ASCII", "['é']")):
        character_tokenizer("aé")


def test_a_saved_model_and_tokenizer_are_restored(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(SortTask.alphabet)
    model = tiny_model(tokenizer, seed=0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    # No id of the loaded tokenizer exceeds the embedding.
    assert len(loaded_tokenizer) == len(tokenizer) == loaded.config.vocab_size == 20
    assert loaded_tokenizer("dbcaf><eos>")["input_ids"] == tokenizer("dbcaf><eos>")["input_ids"]
    assert loaded_tokenizer.decode([3, 4, 2]) == "ab<eos>"
    assert loaded_tokenizer.apply_chat_template(CHAT, tokenize=False) == "ba>ab<eos>"
    assert (loaded.generation_config.eos_token_id, loaded.generation_config.pad_token_id) == (2, 0)
    ids = torch.tensor([tokenizer("dbcaf>")["input_ids"]])
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


@pytest.fixture(scope="module")
def word() -> PreTrainedTokenizerFast:
    return task_tokenizer(WordTask())


@pytest.fixture(scope="module")
def loaded_word(word: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("word")
    tiny_model(word, seed=0).save_pretrained(folder)
    word.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_a_trained_tokenizer_merges_frequent_characters_and_keeps_digits_separate(
    word: PreTrainedTokenizerFast,
) -> None:
    assert len(word) == WordTask.vocabulary == 369
    assert (word.pad_token_id, word.bos_token_id, word.eos_token_id) == (0, 1, 2)
    ids = word("How many are left?\n12-3=9 #### 9")["input_ids"]
    pieces = ["How", " many", " are", " left", "?\n", "1", "2", "-", "3", "=", "9", " ####", " ", "9"]
    assert [word.decode([i]) for i in ids] == pieces
    with_digits = [token for token in word.get_vocab() if any(c.isdigit() and c.isascii() for c in token)]
    assert sorted(with_digits) == list("0123456789")


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text("0123456789+-= #\n?.,abcHAow"))
def test_a_trained_tokenizer_decodes_composed_text_exactly_before_and_after_loading(
    word: PreTrainedTokenizerFast, loaded_word: PreTrainedTokenizerFast, text: str
) -> None:
    text = unicodedata.normalize("NFC", text)
    ids = word(text)["input_ids"]
    assert word.decode(ids) == text
    assert loaded_word(text)["input_ids"] == ids
    assert loaded_word.decode(ids) == text


def test_a_loaded_tokenizer_encodes_every_row_like_the_original(
    word: PreTrainedTokenizerFast, loaded_word: PreTrainedTokenizerFast
) -> None:
    assert loaded_word.get_vocab() == word.get_vocab()
    longest = 0
    for row in WordTask().demonstrations(2000, seed=5):
        both = word([row["prompt"], f"{row['response']}<eos>"])["input_ids"]
        assert loaded_word([row["prompt"], f"{row['response']}<eos>"])["input_ids"] == both
        longest = max(longest, len(both[1]) if "####" in row["response"] else 0)
    assert longest == WordTask.max_response_tokens
    assert loaded_word.apply_chat_template(CHAT, tokenize=False) == "ba>ab<eos>"


def test_training_the_tokenizer_of_a_task_is_deterministic(word: PreTrainedTokenizerFast) -> None:
    again = task_tokenizer(WordTask())
    assert again.backend_tokenizer.to_str() == word.backend_tokenizer.to_str()
    # A stored value, computed by another process: if it changed, cached models and runs would no longer be comparable.
    vocabulary = json.dumps(sorted(word.get_vocab().items()))
    assert hashlib.blake2b(vocabulary.encode(), digest_size=8).hexdigest() == "ddc937813b76a920"


def test_a_vocabulary_smaller_than_the_byte_alphabet_is_refused() -> None:
    with pytest.raises(ValueError, match=says("size=258", 259)):
        learnt_tokenizer(["a"], 258)


def test_the_model_has_tied_embeddings_and_0_4_million_float32_parameters() -> None:
    model = tiny_model(character_tokenizer(SortTask.alphabet), seed=0)
    # embedding 20*128; per layer: q and o 2*128*128, k and v 2*128*64, biases 128+2*64, mlp 3*128*384, norms 2*128
    per_layer = 2 * 128 * 128 + 2 * 128 * 64 + 256 + 3 * 128 * 384 + 256
    assert sum(p.numel() for p in model.parameters()) == 20 * 128 + 2 * per_layer + 128 == 396_928
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_seed_determines_the_weights_without_using_global_random_state() -> None:
    tokenizer = character_tokenizer("ab")
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, again, other = (tiny_model(tokenizer, seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
