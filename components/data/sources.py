"""Contract of the data sources of plug-ins, which generate rows for a data path of the form `<scheme>:<name>`.

This module does not import torch.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any, Literal

from components.registry import load, names
from components.schemes import has_scheme_of, made_by_scheme

KIND = "data source"
"""Kind of plug-in in the registry. It maps a scheme to a subclass of `DataSource`."""
READER = "data reader"
"""Kind of plug-in in the registry that reads the rows of all other sources, as prompts or as demonstrations."""
Split = Literal["train", "heldout"]
"""Split of the generated prompts."""

DEFAULT_ROWS = 10_000
"""Number of rows that are drawn if the caller sets no limit."""
HELDOUT_SHARE = 10
"""One in this number of prompts belongs to the held-out split."""
MAX_MISSES = 2_000
"""Maximum number of consecutive draws without a new prompt. More of them fail a request for distinct prompts."""


class DataSource(ABC):
    """A generator of rows. The same arguments give the same rows in every process."""

    def __init__(self, name: str) -> None:
        """
        Args:
            name: the text after the scheme.

        Raises:
            ValueError: the source does not exist.
        """
        self.name = name

    @property
    @abstractmethod
    def scorer(self) -> str:
        """Name of the scorer that reads the labels."""

    @abstractmethod
    def prompts(self, split: Split, count: int, seed: int) -> list[dict[str, Any]]:
        """Draw `count` distinct prompts as `{"input", "label", "datasource"}`. The splits have no prompt in common.

        Raises:
            ValueError: the split is unknown, or has too few prompts.
        """

    def demonstrations(self, count: int, seed: int) -> list[dict[str, Any]]:  # noqa: ARG002 - for sources that have some
        """Draw demonstrations as `{"prompt", "response"}` or `{"messages"}`, none of them for a held-out prompt.

        Raises:
            ValueError: the source has no demonstrations.
        """
        raise ValueError(f"{self.name!r} has prompts and no demonstrations; set data.path to a file of demonstrations")

    def pairs(self, count: int, seed: int) -> list[dict[str, Any]]:  # noqa: ARG002 - for sources that have some
        """Draw pairs of responses as `{"prompt", "chosen", "rejected"}`, none of them for a held-out prompt.

        Raises:
            ValueError: the source has no pairs.
        """
        raise ValueError(f"{self.name!r} has prompts and no pairs of responses; set data.path to a file of pairs")


def is_drawn(source: str) -> bool:
    """Return True if a plug-in generates the rows of a source."""
    return has_scheme_of(KIND, source)


def data_source(source: str) -> DataSource | None:
    """Return the generator of a source's rows, or None for a file, a folder, or a data set on the hub.

    Raises:
        MissingPlugin: no plug-in provides the scheme.
        ValueError: the plug-in has no source of that name.
    """
    return made_by_scheme(KIND, source)


def check_sources(path: str) -> None:
    """Check that a plug-in generates the rows of each source with a scheme, and that all others have a reader.

    Files are not opened.

    Args:
        path: comma-separated sources.

    Raises:
        ValueError: see `data_source`, and `check_reader` of the reader.
    """
    for source in filter(None, map(str.strip, path.split(","))):
        if data_source(source) is None:
            # Asked before the run starts: reading would fail only after the models are loaded.
            load(READER, "check", f"source={source}")(source)


def source_forms() -> str:
    """Return the forms of sources other than files, for error messages: `a name on the hub or task:<name>`."""
    *forms, last = ["a name on the hub", *(f"{scheme}:<name>" for scheme in names(KIND))]
    return f"{', '.join(forms)} or {last}".lstrip()


def is_heldout(prompt: str) -> bool:
    """Return True if a prompt belongs to the held-out split.

    This depends only on the text of the prompt, so no seed, process or version can move a prompt to the other split.
    """
    # Python's own hash differs from process to process.
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELDOUT_SHARE == 0
