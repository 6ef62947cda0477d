"""Check of the weight files of a model from their headers, without reading the weights."""

from __future__ import annotations

import os
from pathlib import Path

from components.models.disk.tensor_header import INDEX, SINGLE, check_data, index_of, read_header


def check_weight_files(folder: Path) -> None:
    """Check the headers of the safetensors files in a model's folder, if there are any.

    Raises:
        ValueError: a file is missing or damaged. The message names it.
    """
    index = index_of(folder)
    names: list[str] = []
    if index is not None:
        names = sorted(set(index.values()))
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    for name in names:
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing, which {INDEX} names; fetch the model again")
        file = os.open(path, os.O_RDONLY)
        try:
            # The header has all shapes and offsets, so a damaged file is found without reading its weights.
            start, entries = read_header(file)
            check_data(entries, start, os.fstat(file).st_size)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}; fetch the model again") from error
        finally:
            os.close(file)
