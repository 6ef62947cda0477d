"""Number of rows of a data source before a run starts, if it can be determined quickly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from components.data.sources import DEFAULT_ROWS, is_drawn

_COUNTED_BYTES = 64_000_000
"""Maximum size of a file whose lines are counted before a run starts."""


def steps_text(arithmetic: Callable[[int], str], source: str, most: int | None, probs: str | None = None) -> str:
    """Describe the steps of a run over the rows of a source, or say that their number is not known yet.

    Args:
        arithmetic: describes the steps of a number of rows.
        source: path or paths, as a recipe receives them.
        most: maximum number of rows that are used, or None for all.
        probs: shares of a mixture, which repeats rows.
    """
    counts = [_count_rows(name.strip(), most) for name in source.split(",")]
    # A mixture repeats the rows of small sources, so the sum of the counts says nothing without max_samples.
    if None in counts or (probs and most is None):
        return f"not known before {source} is read"
    total = sum(count or 0 for count in counts)
    return arithmetic(min(total, most or total))


def _count_rows(name: str, most: int | None) -> int | None:
    path = Path(name).expanduser()
    if is_drawn(name):
        return most or DEFAULT_ROWS
    try:
        if path.suffix == ".jsonl" and path.is_file() and path.stat().st_size <= _COUNTED_BYTES:
            with path.open("rb") as file:
                return sum(1 for line in file if line.strip())
        if path.suffix == ".parquet" and path.is_file():
            from pyarrow.parquet import read_metadata

            return read_metadata(path).num_rows
    except (OSError, ValueError):  # the run will raise the same error when it reads the file, with the reason
        return None
    return None
