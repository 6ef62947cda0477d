"""Checks of a model in a folder, in the cache or on the hub.

Nothing here imports torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from components.net.hub import cached_folder
from components.net.hub_requests import find_model
from plugins.model_checks.files import check_weight_files
from training.options.model_options import ModelOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_files(path: str) -> None:
    """Check that a model exists or can be fetched, and that its weight files are whole.

    Raises:
        ValueError: it does not exist or is unusable. The message is written to follow `option=path: `.
    """
    find_model(path)
    folder = Path(path).expanduser()
    check_weight_files(folder if folder.is_dir() else cached_folder(path))


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


def check_positions(model: ModelOptions, longest: int, max_new_tokens: int) -> None:
    """Check that a model has positions for the longest prompt together with a response.

    Args:
        model: options of the model.
        longest: number of tokens of the longest prompt.
        max_new_tokens: maximum number of tokens after a prompt.

    Raises:
        ValueError: the model has fewer positions.
    """
    # Beyond its positions a model returns noise or fails inside a kernel, often in the middle of a run.
    positions = getattr(find_model(model.path).get_text_config(), "max_position_embeddings", None)
    if positions and longest + max_new_tokens > positions:
        raise ValueError(
            f"model.path={model.path} has {positions} positions, fewer than a prompt of {longest} tokens with "
            f"rollout.max_new_tokens={max_new_tokens}; lower rollout.max_new_tokens or data.max_prompt_tokens"
        )
