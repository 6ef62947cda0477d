"""The notebooks of docs/notebooks run unchanged, and their stored output is current."""

import sys
from pathlib import Path

import pytest

from tests.notebooks import NOTEBOOKS, code_cells, read, run


def test_the_two_notebooks_are_valid_for_jupyter() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["components", "local_run"]
    for path in NOTEBOOKS:
        notebook = read(path)
        assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
        ids = [cell["id"] for cell in notebook["cells"]]
        assert len(ids) == len(set(ids))
        assert all({"cell_type", "metadata", "source"} <= cell.keys() for cell in notebook["cells"])
        assert all(cell["outputs"] for cell in code_cells(path)), f"{path.name}: run python -m tests.notebooks"


@pytest.mark.full
def test_the_components_notebook_shows_current_numbers_without_ray(tmp_path: Path) -> None:
    (path,) = (path for path in NOTEBOOKS if path.stem == "components")
    had_ray = "ray" in sys.modules
    outputs = run(path, tmp_path)
    assert outputs == [cell["outputs"] for cell in code_cells(path)]
    assert had_ray or "ray" not in sys.modules


@pytest.mark.full
def test_the_recipe_notebook_learns_in_local_mode_and_plots_metrics(tmp_path: Path) -> None:
    (path,) = (path for path in NOTEBOOKS if path.stem == "local_run")
    outputs = run(path, tmp_path)
    plots = [output for cell in outputs for output in cell if output["output_type"] == "display_data"]
    assert len(plots) == 1
    assert len(plots[0]["data"]["image/png"]) > 10_000
    first, last = (float(word) for word in outputs[-1][0]["text"][-1].split()[-3::2])
    assert last > first
