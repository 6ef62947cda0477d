"""Digest of the trained weights after each step, in digests.jsonl of the run folder."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from components.weights.digest import Digests
from training.tracking.serialization import json_lines

if TYPE_CHECKING:
    from components.train.engine import TrainEngine

FILE = "digests.jsonl"
"""File in the run folder: one object per step and role, with the keys `step`, `role` and `digest`.

A step that was repeated after a resume has several lines, of which the last one counts.
"""

_log = logging.getLogger(__name__)
_unwritable: set[str] = set()
"""Run folders whose file could not be written."""


def record(engine: TrainEngine, run_dir: str, step: int, role: str) -> None:
    """Append the digest of the weights to the file. All ranks must call it, and rank 0 writes."""
    digest = weights_digest(engine)
    if engine.rank == 0:
        append_line(run_dir, step, role, digest)


def append_line(run_dir: str, step: int, role: str, digest: str) -> None:
    """Append a line to the file. If that fails, log one warning, and do not try again in this process."""
    if run_dir in _unwritable:
        return
    try:
        with Path(run_dir, FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "role": role, "digest": digest}) + "\n")
    except OSError as error:
        # Only a later replay needs the file, so a full disk must not end the run.
        _unwritable.add(run_dir)
        _log.warning("%s of %s cannot be written, and replays cannot compare weights: %s", FILE, run_dir, error)


def weights_digest(engine: TrainEngine) -> str:
    """Return a digest of the parameters as the ranks hold them: 16 hexadecimal digits, the same on every rank.

    Each rank reads only its own parts, so the digest depends on the number of ranks and on the sharding.
    """
    digests = Digests()
    for name, parameter in engine.model.named_parameters():
        if not parameter.requires_grad:  # frozen weights never change
            continue
        # DeepSpeed's ZeRO 3 and torch's DTensor keep the part of this rank in an attribute.
        part = getattr(parameter, "ds_tensor", parameter)
        part = getattr(part, "_local_tensor", part)
        digests.add(name, part)
    text = json.dumps([engine.rank, digests.result()])
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    total = torch.tensor([number], device=engine.device)
    # A sum does not depend on the order of the ranks, and each rank has hashed its number into its summand.
    dist.all_reduce(total)
    return f"{int(total):016x}"


def read_digests(run_dir: Path) -> dict[tuple[int, str], str]:
    """Return the digest of each (step, role) of a run; empty if the run has recorded none."""
    return {(line["step"], line["role"]): line["digest"] for line in json_lines(run_dir / FILE)}
