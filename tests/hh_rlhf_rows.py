"""hh-rlhf for tests: the real file if it is next to the repository, otherwise generated rows in the same format."""

from __future__ import annotations

import gzip
import json
import random
import warnings
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "shared" / "data" / "hh_rlhf" / "harmless-base-test.jsonl.gz"
GENERATED_ROWS = 300


def hh_rlhf_file(folder: Path) -> Path:
    """Return the rows of "chosen" and "rejected" dialogues, each one string, as a gzipped file. Generated rows are
    written to `folder`.
    """
    if FILE.is_file():
        return FILE
    warnings.warn("there is no hh-rlhf here: generated rows take its place", stacklevel=2)
    rng = random.Random("hh-rlhf")
    rows = [_row(rng) for _ in range(GENERATED_ROWS)]
    path = folder / FILE.name
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def _row(rng: random.Random) -> dict[str, str]:
    turns = rng.randint(0, 8)
    # Few names, so that conversations repeat, and varying lengths like in the real data.
    said = f"\n\nHuman: Is {rng.choice('ABCDEFGHIJKLMNOPQRSTUVWXYZ')}{rng.randint(0, 3)} kind?"
    for _ in range(turns):
        said += f"\n\nAssistant: {'Maybe. ' * rng.randint(1, 60)}Why?\n\nHuman: {rng.randint(0, 10**6)} times I asked."
    responses = rng.sample(["Yes, I think so.", "I’d rather not say.", "No!", "", "Ask again."], 2)
    return {name: f"{said}\n\nAssistant: {text}" for name, text in zip(("chosen", "rejected"), responses)}
