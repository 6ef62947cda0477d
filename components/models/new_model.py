"""Untrained models that a recipe makes for its data, for options with `<scheme>:<name>` in place of a path.

This module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from components.models.sources import NEW_KIND
from components.schemes import made_by_scheme

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class NewModel(ABC):
    """An untrained model that a recipe makes for its data."""

    def __init__(self, name: str) -> None:
        """
        Args:
            name: the text after the scheme.

        Raises:
            ValueError: there is no such model.
        """
        self.name = name

    @abstractmethod
    def tokenizer(self, texts: Iterable[str] = (), vocabulary: int | None = None) -> PreTrainedTokenizerBase:
        """Make the model's tokenizer.

        Args:
            texts: texts from which the vocabulary is learnt, unless the name of the model determines it.
            vocabulary: number of tokens of a vocabulary that is learnt. Default: the smallest possible number.
        """

    @abstractmethod
    def save(
        self, tokenizer: PreTrainedTokenizerBase, folder: str, seed: int, max_positions: int | None = None
    ) -> None:
        """Write a folder with a model of random weights whose vocabulary is that of a tokenizer."""

    @abstractmethod
    def config(self) -> dict[str, Any] | None:
        """Return the entries of config.json that determine the size of the model, or None if they depend on texts."""


def new_model(path: str) -> NewModel:
    """Return the untrained model that a path names.

    Raises:
        MissingPlugin: no plug-in provides the scheme.
        ValueError: there is no model of that name.
    """
    model = made_by_scheme(NEW_KIND, path)
    assert model is not None, path
    return model
