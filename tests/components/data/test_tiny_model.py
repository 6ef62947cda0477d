"""The tokenizer of characters and the tiny model, made and loaded again."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.data.tasks import SortTask
from components.data.tiny_model import character_tokenizer, tiny_model

CHAT = [{"role": "user", "content": "ba>"}, {"role": "assistant", "content": "ab"}]


def test_every_character_is_one_token_after_pad_bos_and_eos() -> None:
    tokenizer = character_tokenizer("ab>")
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer("ba>")["input_ids"] == [4, 3, 5]
    assert len(tokenizer) == 6


@pytest.mark.parametrize("text", ["ab>", "b a\n", "", "  a", "ab<eos>", "7+5=12"])
def test_decoding_gives_the_text_back(text: str) -> None:
    tokenizer = character_tokenizer("ab> \n0123456789+=")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_can_be_left_out_of_the_text() -> None:
    assert character_tokenizer("ab").decode([3, 4, 2, 0], skip_special_tokens=True) == "ab"


def test_the_chat_template_closes_the_assistants_turns() -> None:
    tokenizer = character_tokenizer("ab>")
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "ba>ab<eos>"
    assert tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True) == "ba>"


def test_an_alphabet_with_repeats_or_foreign_letters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"without repeats; look at \['a'\]"):
        character_tokenizer("aba")
    with pytest.raises(ValueError, match=r"ASCII characters without repeats; look at \['é'\]"):
        character_tokenizer("aé")


def test_a_saved_model_and_tokenizer_load_as_they_were(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(SortTask.alphabet)
    model = tiny_model(tokenizer, seed=0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    # No id of the loaded tokenizer may lie beyond the embedding.
    assert len(loaded_tokenizer) == len(tokenizer) == loaded.config.vocab_size == 20
    assert loaded_tokenizer("dbcaf><eos>")["input_ids"] == tokenizer("dbcaf><eos>")["input_ids"]
    assert loaded_tokenizer.decode([3, 4, 2]) == "ab<eos>"
    assert loaded_tokenizer.apply_chat_template(CHAT, tokenize=False) == "ba>ab<eos>"
    assert (loaded.generation_config.eos_token_id, loaded.generation_config.pad_token_id) == (2, 0)
    ids = torch.tensor([tokenizer("dbcaf>")["input_ids"]])
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


def test_the_model_has_tied_embeddings_and_0_4_million_float32_parameters() -> None:
    model = tiny_model(character_tokenizer(SortTask.alphabet), seed=0)
    # embedding 20*128; per layer: q and o 2*128*128, k and v 2*128*64, biases 128+2*64, mlp 3*128*384, norms 2*128
    per_layer = 2 * 128 * 128 + 2 * 128 * 64 + 256 + 3 * 128 * 384 + 256
    assert sum(p.numel() for p in model.parameters()) == 20 * 128 + 2 * per_layer + 128 == 396_928
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_seed_fixes_the_weights_and_leaves_the_global_random_state_alone() -> None:
    tokenizer = character_tokenizer("ab")
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, again, other = (tiny_model(tokenizer, seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
