"""Work of a rank in test_held_memory.py: the growth of its memory in each phase of a model."""

from pathlib import Path
from typing import Any

from components.process.code_files import load_file
from components.train import partitioned_model

BUCKET_BYTES = 8 * 2**20
LAYERS = 12
ROOT = Path(__file__).resolve().parents[3]
bench: Any = load_file(ROOT / "scripts" / "bench_memory.py")
# A model of many small layers, which are nearly all of it.
bench.VOCABULARY, bench.HIDDEN, bench.INTERMEDIATE = 1000, 512, 2048


def growth(folder: str, kind: str, work: str) -> dict[str, Any]:
    """Return the bytes by phase, and the digest of the state."""
    partitioned_model.BUCKET_BYTES = {"cpu": BUCKET_BYTES}
    record = bench.measured(Path(folder), kind, work)
    grown = {name: peak - record["starts"][name] for name, peak in record["peaks"].items()}
    return grown | {"digest": record["digest"]}
