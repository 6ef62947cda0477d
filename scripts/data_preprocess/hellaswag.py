"""HellaSwag as parquet files in verl's format: which of four endings resumes from a text?

python scripts/data_preprocess/hellaswag.py                           from the hub to ~/data/hellaswag
python scripts/data_preprocess/hellaswag.py --input D --local_dir E   from a folder with train.jsonl, validation.jsonl

test.parquet is made of the split validation: that called test has no labels.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Not the folder of this script, whose math.py would stand for Python's.
sys.path[0], __package__ = str(ROOT), "data_preprocess"
sys.path.append(str(ROOT / "scripts"))

from .verl_files import arguments_of, preprocess, verl_row  # noqa: E402 (the project may not be installed)

INSTRUCTION = 'Which of these resumes from the text? Write its number after "####".'


def make_row(record: dict[str, Any], split: str, index: int, source: str) -> dict[str, Any]:
    """The ground truth is the right ending's number, from 0."""
    endings = list(record["endings"])
    truth = str(record["label"])
    if truth not in map(str, range(len(endings))):
        raise ValueError(f"the label {truth!r} is none of 0 to {len(endings) - 1}")
    choices = "\n".join(f"{number}. {ending}" for number, ending in enumerate(endings))
    prompt = f"{record['activity_label']}: {record['ctx']}\n\n{INSTRUCTION}\n{choices}"
    return verl_row(source, prompt, truth, ability="commonsense", split=split, index=index, choices=endings)


if __name__ == "__main__":
    options = arguments_of(__doc__, "hellaswag", "Rowan/hellaswag", "Rowan/hellaswag").parse_args()
    sys.exit(preprocess(options, make_row, {"train": "train", "test": "validation"}))
