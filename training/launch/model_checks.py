"""Checks of the models of a run before any process starts.

Nothing here imports torch, unless a model other than a demonstration's has to be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.models.sources import made_model
from components.registry import find
from training.options.model_options import ModelOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHECK = "model check"
"""Kind of the plug-ins that check a model in a folder or on the hub. Without one, the model is not checked."""


def check_model(path: str, option: str = "model.path") -> None:
    """Check that the model that an option names exists, or can be created or fetched.

    Raises:
        ValueError: it does not exist or is unusable. The message says what to set.
    """
    try:
        # A plug-in makes its model at the start of the run, so there may be no files to check yet.
        if (made := made_model(path)) is not None:
            made.check()
        elif check := find(CHECK, "files"):
            check(path)
    except ValueError as error:
        raise type(error)(f"{option}={path}: {error}") from error


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: ModelOptions) -> None:
    """Check that a model has an embedding for every token of its tokenizer.

    Raises:
        ValueError: the tokenizer has more tokens than the model has embeddings.
    """
    # A token without an embedding would end the run at the first text that has it, or read another row on a GPU.
    if check := find(CHECK, "vocabulary"):
        check(tokenizer, model)
