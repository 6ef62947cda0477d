"""Check that batches that are generated ahead can be saved in a checkpoint."""

from __future__ import annotations

from components.batch import Batch
from components.data.prompts import PromptSource


def check_savable(prompts: PromptSource) -> None:
    """Check that batches of these prompts can be saved, as needed for the queue of batches in a checkpoint.

    Raises:
        ValueError: their labels or columns cannot be saved.
    """
    # The first row stands for all, because a check of every row would take long for large data.
    row = prompts.rows[0]
    first = {name: [row[name]] for name in ("label", "extra_info") if name in row}
    try:
        Batch.from_rows({"tokens": [[0]]}, objects=first).to_table()
    except ValueError as error:
        raise ValueError(
            f"batches are generated ahead, and a checkpoint cannot hold their labels or columns ({error}); make "
            "these text, numbers, lists or objects of these, or train without asynchronous.enabled (async_train)"
        ) from error
