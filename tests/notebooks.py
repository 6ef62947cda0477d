"""Runs the notebooks of docs/notebooks without Jupyter: the cells in order, in one namespace.

python -m tests.notebooks        write their output and plots into the files
"""

import ast
import base64
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.recipe_copies import ROOT

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    """The cells with code, each with its `source` as a list of lines."""
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]


def read(path: Path) -> dict[str, Any]:
    """Return the parsed JSON of a notebook."""
    return json.loads(path.read_text(encoding="utf-8"))


def run(path: Path, folder: Path) -> list[list[dict[str, Any]]]:
    """Run the code cells in `folder`. Return the outputs of each: printed text and plots."""
    import matplotlib as mpl  # for the tier of tests that runs them

    mpl.use("Agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    os.chdir(folder)
    try:
        return [outputs_of("".join(cell["source"]), namespace) for cell in code_cells(path)]
    finally:
        os.chdir(before)


def outputs_of(source: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell. If its last line is an expression, its value is printed, as in Jupyter."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
            if value is not None:
                print(value)
    lines = printed.getvalue().splitlines(keepends=True)
    outputs = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return [*outputs, *map(picture, figures())]


def figures() -> list[bytes]:
    """Return the open figures as PNG, and close them."""
    from matplotlib import pyplot

    pictures = []
    for number in pyplot.get_fignums():
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, format="png", dpi=70)
        pictures.append(file.getvalue())
    pyplot.close("all")
    return pictures


def picture(png: bytes) -> dict[str, Any]:
    """Return the output entry of a picture."""
    data = {"image/png": base64.b64encode(png).decode()}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def main() -> None:
    """Run each notebook and write it with its outputs."""
    for path in NOTEBOOKS:
        notebook = read(path)
        with tempfile.TemporaryDirectory() as folder:
            outputs = run(path, Path(folder))
        for cell, cell_outputs in zip((c for c in notebook["cells"] if c["cell_type"] == "code"), outputs, strict=True):
            cell["outputs"] = cell_outputs
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
