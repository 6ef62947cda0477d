"""Rows of data sets on the hub of Hugging Face."""

from __future__ import annotations

from typing import Any

from components.data.readers import FILE_TYPES
from components.data.sources import source_forms
from components.net.hub import first_line
from components.net.hub_requests import why_unreachable
from plugins.data_files.quiet import quiet
from plugins.data_files.tables import rows_of


def read_hub(name: str, data_dir: str | None, split: str) -> list[dict[str, Any]]:
    """Return the rows of a split of a data set.

    Args:
        name: name of the data set.
        data_dir: folder inside the data set. None: the complete data set.
        split: name of the split.

    Raises:
        ValueError: the data set cannot be loaded from the hub or from the cache.
    """
    import datasets
    from datasets import config
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    was_offline = config.HF_HUB_OFFLINE
    reason = None
    with quiet():
        try:
            if name in _PACKAGED_DATASETS_MODULES:
                # `datasets` takes such a name for "all files of this type in the working directory".
                raise ValueError("it is the name of a file type")
            reason = why_unreachable(name, "dataset")
            # Without this, `datasets` retries for half a minute before it reads its cache.
            config.HF_HUB_OFFLINE = was_offline or reason is not None
            loaded: Any = datasets.load_dataset(name, data_dir=data_dir, split=split).with_format("arrow")
            return rows_of(loaded[:].to_batches())
        except Exception as error:  # file readers and HTTP clients document no common exception type
            raise ValueError(
                f"there is no file or folder {name!r} here, and the hub did not give a data set of that name, split "
                f"{split!r} ({reason or _reason(error)}); give a {', '.join(FILE_TYPES)} file, a folder, "
                f"{source_forms()}"
            ) from error
        finally:
            config.HF_HUB_OFFLINE = was_offline


def _reason(error: BaseException) -> str:
    """Return the first line of an error's message, without the wrapper of `datasets`, which has no details."""
    from datasets.exceptions import DatasetGenerationError

    while isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
