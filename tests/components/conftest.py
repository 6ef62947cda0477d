"""Tiny models for the engine tests, written to folders."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

END = 1
VOCAB = 20


def write_model(
    folder: Path, seed: int, tied: bool, hidden: int = 64, positions: int = 64, spread: float = 0.15
) -> Path:
    """A random Qwen2 model. Its weights are so large that its distributions are far from uniform."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=spread,
        tie_word_embeddings=tied,
        bos_token_id=2,
        eos_token_id=END,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tied", seed=1, tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "untied", seed=2, tied=False)


@pytest.fixture(scope="session")
def other_tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the shape of `tied_model` and other weights."""
    return write_model(tmp_path_factory.mktemp("models") / "other_tied", seed=3, tied=True)


@pytest.fixture(scope="session")
def other_untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the shape of `untied_model` and other weights."""
    return write_model(tmp_path_factory.mktemp("models") / "other_untied", seed=4, tied=False)
