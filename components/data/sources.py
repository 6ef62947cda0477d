"""Data sources of plug-ins: rows that are drawn, and not read, where a path of data is `<scheme>:<name>`.

Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any, Literal

from components.data.readers import check_reader
from components.registry import names
from components.schemes import has_scheme_of, made_by_scheme

KIND = "data source"
"""Kind of the plug-ins, which provide subclasses of `DataSource` by their schemes."""
Split = Literal["train", "heldout"]

DEFAULT_ROWS = 10_000
"""Number of rows that are drawn if the caller sets no limit."""
HELDOUT_SHARE = 10
"""One prompt in this many belongs to the held-out split."""
MAX_MISSES = 2_000
"""Number of draws in a row without a new prompt after which a request for distinct prompts is refused."""


class DataSource(ABC):
    """A generator of rows. The same arguments give the same rows in every process."""

    def __init__(self, name: str) -> None:
        """
        Args:
            name: the text after the scheme.

        Raises:
            ValueError: there is no such source.
        """
        self.name = name

    @property
    @abstractmethod
    def scorer(self) -> str:
        """Name of the scorer that reads the labels."""

    @abstractmethod
    def prompts(self, split: Split, count: int, seed: int) -> list[dict[str, Any]]:
        """Draw `count` different prompts as `{"input", "label", "datasource"}`. The splits share no prompt.

        Raises:
            ValueError: there is no such split, or there are too few prompts.
        """

    def demonstrations(self, count: int, seed: int) -> list[dict[str, Any]]:  # noqa: ARG002 - for sources that have some
        """Draw demonstrations as `{"prompt", "response"}` or `{"messages"}`; none of them is of a held-out prompt.

        Raises:
            ValueError: the source has none.
        """
        raise ValueError(f"{self.name!r} has prompts and no demonstrations; set data.path to a file of demonstrations")

    def pairs(self, count: int, seed: int) -> list[dict[str, Any]]:  # noqa: ARG002 - for sources that have some
        """Draw pairs of responses as `{"prompt", "chosen", "rejected"}`; none of them is of a held-out prompt.

        Raises:
            ValueError: the source has none.
        """
        raise ValueError(f"{self.name!r} has prompts and no pairs of responses; set data.path to a file of pairs")


def is_drawn(source: str) -> bool:
    """Return True if a plug-in draws the rows of a source."""
    return has_scheme_of(KIND, source)


def data_source(source: str) -> DataSource | None:
    """Return the generator of a source's rows; None for a file, a folder, or a data set on the hub.

    Raises:
        MissingPlugin: no plug-in provides the scheme.
        ValueError: there is no source of that name.
    """
    return made_by_scheme(KIND, source)


def check_sources(path: str) -> None:
    """Check that there is a reader of each source, or where its name has a scheme, a plug-in that draws its rows. Files
    are not looked at.

    Args:
        path: sources, with commas between them.

    Raises:
        ValueError: see `data_source` and `check_reader`.
    """
    for source in filter(None, map(str.strip, path.split(","))):
        if data_source(source) is None:
            check_reader(source)


def source_forms() -> str:
    """Return the forms of the sources that are no files, for messages: `a name on the hub or task:<name>`."""
    *forms, last = ["a name on the hub", *(f"{scheme}:<name>" for scheme in names(KIND))]
    return f"{', '.join(forms)} or {last}" if forms else f"or {last}"


def is_heldout(prompt: str) -> bool:
    """Return True if a prompt is kept for evaluation.

    It depends on the prompt's text alone, so no seed, process or version can move a prompt to the other split.
    """
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELDOUT_SHARE == 0
