"""Write MATH as parquet files in verl's format.

python scripts/data_preprocess/math.py                           from the hub to ~/data/math/{train,test}.parquet
python scripts/data_preprocess/math.py --input D --local_dir E   from a folder with train.jsonl and test.jsonl
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Python puts the folder of the script first on the path, where math.py would hide the module of the standard library.
sys.path[0] = str(ROOT)
__package__ = "data_preprocess"
sys.path.append(str(ROOT / "scripts"))

from .verl_files import arguments_of, preprocess, verl_row  # noqa: E402 (the project may not be installed)

HUB_NAME = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = r"Think step by step, and write the final answer in \boxed{}."


def make_row(record: dict[str, Any], split: str, index: int, source: str) -> dict[str, Any]:
    """Return a row. The ground truth is the content of the last box of the solution."""
    extra = {"split": split, "index": index, **{key: record.get(key) for key in ("level", "type")}}
    truth = last_boxed(record["solution"])
    return verl_row(source, f"{record['problem']} {INSTRUCTION}", truth, ability="math", **extra)


def last_boxed(solution: str) -> str:
    r"""Return the content of the last \boxed{} or \fbox{}, with its inner braces. \boxed may have no braces: \boxed 3.

    Raises:
        ValueError: there is no box, or it is not closed.
    """
    start = max(solution.rfind(r"\boxed"), solution.rfind(r"\fbox"))
    if start < 0:
        raise ValueError(f"the solution {solution[-80:]!r} has no box")
    text = solution[start:].removeprefix(r"\boxed").removeprefix(r"\fbox")
    if not text.startswith("{"):
        return text.split("$")[0].strip()
    depth = 0
    for end, character in enumerate(text):
        # An escaped brace, as in \{, is text and does not nest.
        if text[end - 1 : end] != "\\":
            depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[1:end].strip()
    raise ValueError(f"the box {text[:80]!r} is not closed")


if __name__ == "__main__":
    sys.exit(preprocess(arguments_of(__doc__, "math", HUB_NAME, HUB_NAME).parse_args(), make_row))
