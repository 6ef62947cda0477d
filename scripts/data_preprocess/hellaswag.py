"""Write HellaSwag as parquet files in verl's format. The task is to select the right one of four endings of a text.

python scripts/data_preprocess/hellaswag.py                           from the hub to ~/data/hellaswag
python scripts/data_preprocess/hellaswag.py --input D --local_dir E   from a folder with train.jsonl, validation.jsonl

test.parquet has the rows of the split `validation`, because the split `test` has no labels.
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

INSTRUCTION = 'Which of these resumes from the text? Write its number after "####".'


def make_row(record: dict[str, Any], split: str, index: int, source: str) -> dict[str, Any]:
    """Return a row. The ground truth is the number of the right ending, from 0."""
    endings = list(record["endings"])
    truth = str(record["label"])
    if truth not in map(str, range(len(endings))):
        raise ValueError(f"the label {truth!r} is not one of 0 to {len(endings) - 1}")
    choices = "\n".join(f"{number}. {ending}" for number, ending in enumerate(endings))
    prompt = f"{record['activity_label']}: {record['ctx']}\n\n{INSTRUCTION}\n{choices}"
    return verl_row(source, prompt, truth, ability="commonsense", split=split, index=index, choices=endings)


if __name__ == "__main__":
    options = arguments_of(__doc__, "hellaswag", "Rowan/hellaswag", "Rowan/hellaswag").parse_args()
    sys.exit(preprocess(options, make_row, {"train": "train", "test": "validation"}))
