"""Models that plug-ins create for options with `<scheme>:<name>` in place of a path.

This module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.registry import find
from components.schemes import has_scheme_of, made_by_scheme

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KIND = "model source"
"""Kind of the plug-ins that make models which every recipe can start from: subclasses of `MadeModel` by scheme."""
NEW_KIND = "new model"
"""Kind of the plug-ins that make untrained models for the data of a run: subclasses of `NewModel` by scheme."""


class MadeModel(ABC):
    """A model that is made when it is first needed, and kept."""

    def __init__(self, name: str) -> None:
        """
        Args:
            name: the text after the scheme.

        Raises:
            ValueError: there is no such model.
        """
        self.name = name

    @property
    @abstractmethod
    def data_source(self) -> str:
        """The data source whose texts the model's tokenizer is made for, as `data.path` names it."""

    @abstractmethod
    def check(self) -> None:
        """Check that the model is there, or can be made, without making it.

        Raises:
            ValueError: it is not, and cannot.
        """

    @abstractmethod
    def make(self, progress: Callable[[str], None]) -> Path:
        """Return the folder of the model, which is made if it is not there.

        Args:
            progress: called with each line of progress.
        """

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Make the model's tokenizer, whether the model is there or not."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the values of its config.json that set its size."""


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
            texts: the texts that a vocabulary is learnt from, for a model whose name does not fix it.
            vocabulary: number of tokens of such a vocabulary. Default: the smallest possible.
        """

    @abstractmethod
    def save(
        self, tokenizer: PreTrainedTokenizerBase, folder: str, seed: int, max_positions: int | None = None
    ) -> None:
        """Write a model with random weights that fits a tokenizer into a folder."""

    @abstractmethod
    def config(self) -> dict[str, Any] | None:
        """Return the values of its config.json that set its size; None where they depend on texts."""


def is_made(path: str) -> bool:
    """Return True if a plug-in makes the model that a path names."""
    return has_scheme_of(KIND, path)


def made_model(path: str) -> MadeModel | None:
    """Return the model that a plug-in makes for a path; None for a folder or a name on the hub.

    Raises:
        MissingPlugin: no plug-in provides the scheme.
        ValueError: there is no model of that name.
    """
    return made_by_scheme(KIND, path)


def check_model_source(path: str) -> None:
    """Check that a plug-in makes the model that a path names, if that has a scheme. Folders are not looked at.

    Raises:
        MissingPlugin: no plug-in provides the scheme.
        ValueError: there is no model of that name.
    """
    if has_scheme_of(NEW_KIND, path):
        new_model(path)
    else:
        made_model(path)


def new_model(path: str) -> NewModel:
    """Return the untrained model that a path names.

    Raises:
        MissingPlugin: no plug-in provides the scheme.
        ValueError: there is no model of that name.
    """
    model = made_by_scheme(NEW_KIND, path)
    assert model is not None, path
    return model


def config_of(path: str) -> dict[str, Any] | None:
    """Return the values that set the size of a model which a plug-in makes; None for any other model."""
    scheme, _, name = path.partition(":")
    for kind in (KIND, NEW_KIND):
        if (source := find(kind, scheme)) is not None:
            try:
                return source(name).config()
            except ValueError:  # there is no such model, which the checks of the run report
                return None
    return None


def resolve_model(path: str, progress: Callable[[str], None] = print) -> str:
    """Return the folder of a model that a plug-in makes, which is made if it is not there; any other path unchanged.

    Raises:
        MissingPlugin: no plug-in provides the scheme.
        ValueError: there is no model of that name.
    """
    if (model := made_model(path)) is not None:
        return str(model.make(progress))
    return path
