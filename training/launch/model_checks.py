"""Checks of the models of a run before any process starts.

Nothing here imports torch, unless a model other than a demonstration's has to be read.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from components.models.disk.tensor_header import check_weight_files
from components.models.sources import made_model
from components.net.hub import cached_folder, find_model
from training.options.model_options import ModelOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_model(path: str, option: str = "model.path") -> None:
    """Check that the model that an option names exists, or can be created or fetched.

    Raises:
        ValueError: it does not exist or is unusable. The message says what to set.
    """
    try:
        if (made := made_model(path)) is not None:
            made.check()
        else:
            find_model(path)
            folder = Path(path).expanduser()
            check_weight_files(folder if folder.is_dir() else cached_folder(path))
    except ValueError as error:
        raise type(error)(f"{option}={path}: {error}") from error


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: ModelOptions) -> None:
    """Check that a model has an embedding for every token of its tokenizer.

    Raises:
        ValueError: the tokenizer has more tokens than the model has embeddings.
    """
    embedded = getattr(find_model(model.path).get_text_config(), "vocab_size", sys.maxsize)
    # vocab_size leaves out added tokens. They may exceed the embedding if no text contains them.
    if tokenizer.vocab_size > embedded:
        raise ValueError(
            f"the tokenizer of {model.tokenizer_path or model.path} has {tokenizer.vocab_size} tokens, but "
            f"model.path={model.path} has embeddings for {embedded}; set model.tokenizer_path to its own tokenizer"
        )
