"""Write GSM8K as parquet files in verl's format.

python scripts/data_preprocess/gsm8k.py                           from the hub to ~/data/gsm8k/{train,test}.parquet
python scripts/data_preprocess/gsm8k.py --input D --local_dir E   from a folder with train.jsonl and test.jsonl
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

INSTRUCTION = 'Think step by step, and write the final answer after "####".'


def make_row(record: dict[str, Any], split: str, index: int, source: str) -> dict[str, Any]:
    """Return a row. The ground truth is the number after the last ####, without commas."""
    question = record["question"]
    answer = record["answer"]
    _, mark, truth = answer.rpartition("####")
    if not mark:
        raise ValueError(f"the answer {answer[-80:]!r} has no ####")
    extra = {"split": split, "index": index, "question": question, "answer": answer}
    return verl_row(source, f"{question} {INSTRUCTION}", truth.strip().replace(",", ""), ability="math", **extra)


if __name__ == "__main__":
    options = arguments_of(__doc__, "gsm8k", "openai/gsm8k@main", "openai/gsm8k").parse_args()
    sys.exit(preprocess(options, make_row))
