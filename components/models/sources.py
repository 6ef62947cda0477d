"""Models that plug-ins create for options with `<scheme>:<name>` in place of a path.

This module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
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
        """Data source for whose texts the tokenizer is made, in the form of `data.path`."""

    @abstractmethod
    def check(self) -> None:
        """Check that the model exists or can be made, without making it.

        Raises:
            ValueError: the model does not exist and cannot be made.
        """

    @abstractmethod
    def make(self, progress: Callable[[str], None]) -> Path:
        """Return the folder of the model. A missing model is made first.

        Args:
            progress: callback that receives each line of progress.
        """

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Make the tokenizer. The model itself need not exist."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the entries of config.json that determine the size of the model."""


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
    """Check that a plug-in makes the model, if the path has a scheme. Paths to folders are not checked.

    Raises:
        MissingPlugin: no plug-in provides the scheme.
        ValueError: there is no model of that name.
    """
    if has_scheme_of(NEW_KIND, path):
        made_by_scheme(NEW_KIND, path)
    else:
        made_model(path)


def config_of(path: str) -> dict[str, Any] | None:
    """Return the entries of config.json that determine the size of a plug-in's model, or None for any other model."""
    scheme, _, name = path.partition(":")
    for kind in (KIND, NEW_KIND):
        if (source := find(kind, scheme)) is not None:
            try:
                return source(name).config()
            except ValueError:  # there is no such model, which the checks of the run report
                return None
    return None


def resolve_model(path: str, progress: Callable[[str], None] = print) -> str:
    """Return the folder of a plug-in's model, which is made if it is missing. Other paths are returned unchanged.

    Raises:
        MissingPlugin: no plug-in provides the scheme.
        ValueError: there is no model of that name.
    """
    if (model := made_model(path)) is not None:
        return str(model.make(progress))
    return path
