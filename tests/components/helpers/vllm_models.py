"""Models and prompts for vLLM's CPU kernels: heads of dimension 32, and a vocabulary of 20 tokens."""

from pathlib import Path

from components.batch import Batch
from tests.components.conftest import VOCAB, write_model

POSITIONS = 128


def write_vllm_model(folder: Path, seed: int, tied: bool) -> Path:
    """Write a random model with heads of dimension 32."""
    return write_model(folder, seed, tied, hidden=128, positions=POSITIONS, spread=0.12)


def prompts_of(rows: list[list[int]]) -> Batch:
    """Return prompts with separate ids."""
    return Batch.from_rows({"tokens": rows}, {"prompt_id": list(range(len(rows))), "sample_id": [0] * len(rows)})


def uneven_prompts(count: int) -> Batch:
    """Prompts of 1 to 7 tokens."""
    return prompts_of([[(5 * i + 3 * t * t) % VOCAB for t in range(1 + i % 7)] for i in range(count)])


def answers_of(batch: Batch) -> list[list[int]]:
    """Return the sampled tokens."""
    return [batch.row(i, "tokens")[batch.row(i, "action_mask")].tolist() for i in range(len(batch))]
