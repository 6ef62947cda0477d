"""GSM8K for tests: the real data if it is next to the repository, otherwise generated rows in the same format."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"
GENERATED_ROWS = {"train": 400, "test": 100}


def gsm8k_rows(split: str) -> list[dict[str, str]]:
    """The rows of "train" or "test", each with "question" and "answer"; the answer ends in `#### N`."""
    path = FOLDER / f"{split}.jsonl"
    if path.is_file():
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    warnings.warn(f"there is no {split}.jsonl of GSM8K here: generated rows take its place", stacklevel=2)
    rng = random.Random(f"gsm8k/{split}")
    return [_row(rng) for _ in range(GENERATED_ROWS[split])]


def _row(rng: random.Random) -> dict[str, str]:
    price, count = rng.randint(2, 4_000), rng.randint(2, 90)
    # Lengths vary like those of the real questions.
    goods = f"{'very ' * rng.randint(0, 20)}good chairs"
    total = price * count
    return {
        "question": f"A shop sells {count} {goods} for ${price} each. How many dollars does it take in?",
        "answer": f"It takes in {count}*${price} = $<<{count}*{price}={total}>>{total:,}.\n#### {total:,}",
    }
