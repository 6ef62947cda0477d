"""Checks of the models that a command names, before any process starts. Nothing here needs torch before a model of the
user's own has to be read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from components.models.disk.tensor_header import check_weight_files
from components.models.sources import is_made, made_model
from components.net.hub import WEIGHTS, ModelNotFound, cached_folder, find_model
from training.options.model_options import ModelOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_model(path: str, option: str = "model.path") -> None:
    """See that the model that an option names can be there, before anything starts.

    Raises:
        ValueError: it cannot; the message says what to set.
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


def absent_models(models: Mapping[str, str]) -> dict[str, str]:
    """Return the models that this machine lacks, by option, with the reason. A plan needs no more than a config.json,
    which is fetched into the cache of the hub.

    Args:
        models: path of each model, by option.
    """
    absent = dict[str, str]()
    for option, path in models.items():
        if is_made(path):
            continue
        folder = Path(path).expanduser()
        try:
            find_model(path)
        except ModelNotFound as error:
            absent[option] = str(error)
        except ValueError:
            continue  # the checks before a run report it
        if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
            absent[option] = "the folder has no weights"
    return absent


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: ModelOptions) -> None:
    """See that a model that is there knows all tokens of the tokenizer that it is to be used with.

    Raises:
        ValueError: it does not.
    """
    embedded = getattr(find_model(model.path).get_text_config(), "vocab_size", sys.maxsize)
    # Tokens that were added later may lie beyond it: no text need hold them.
    if tokenizer.vocab_size > embedded:
        raise ValueError(
            f"the tokenizer of {model.tokenizer_path or model.path} has {tokenizer.vocab_size} tokens, and the "
            f"model of model.path={model.path} knows {embedded}; set model.tokenizer_path to the model's own"
        )
