"""MATH as parquet files in verl's format.

python scripts/data_preprocess/math.py                           from the hub to ~/data/math/{train,test}.parquet
python scripts/data_preprocess/math.py --input D --local_dir E   from a folder with train.jsonl and test.jsonl
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Not the folder of this script, whose math.py would stand for Python's.
sys.path[0], __package__ = str(ROOT), "data_preprocess"
sys.path.append(str(ROOT / "scripts"))

from .verl_files import arguments_of, preprocess, verl_row  # noqa: E402 (the project may not be installed)

HUB_NAME = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = r"Think step by step, and write the final answer in \boxed{}."


def make_row(record: dict[str, Any], split: str, index: int, source: str) -> dict[str, Any]:
    """The ground truth is what is in the solution's last box."""
    extra = {"split": split, "index": index, **{key: record.get(key) for key in ("level", "type")}}
    truth = last_boxed(record["solution"])
    return verl_row(source, f"{record['problem']} {INSTRUCTION}", truth, ability="math", **extra)


def last_boxed(solution: str) -> str:
    r"""What stands in the last \boxed{} or \fbox{}, with the braces in it; \boxed may come without, as in \boxed 3."""
    start = max(solution.rfind(r"\boxed"), solution.rfind(r"\fbox"))
    if start < 0:
        raise ValueError(f"the solution {solution[-80:]!r} has no box")
    text = solution[start:].removeprefix(r"\boxed").removeprefix(r"\fbox")
    if not text.startswith("{"):
        return text.split("$")[0].strip()
    depth = 0
    for end, character in enumerate(text):
        # What is escaped, as in \{, is text.
        depth += {"{": 1, "}": -1}.get(character, 0) if text[end - 1 : end] != "\\" else 0
        if depth == 0:
            return text[1:end].strip()
    raise ValueError(f"the box {text[:80]!r} is not closed")


if __name__ == "__main__":
    sys.exit(preprocess(arguments_of(__doc__, "math", HUB_NAME, HUB_NAME).parse_args(), make_row))
