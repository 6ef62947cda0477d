"""summary.json: how a run went, in a page. Current while it runs, closed by the driver."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from training.tracking.redaction import hide_in_text
from training.tracking.serialization import finite, json_object, plain, write_whole

logger = logging.getLogger(__name__)

Status = Literal["finished", "failed", "stopped"]


def empty_summary(recipe: str | None, seed: int | None) -> dict[str, Any]:
    """Give the summary of a run that has done nothing yet.

    `attempts` counts the starts of its processes, `resumed_from` is the step after which the last of them began; None
    where nothing was resumed.
    """
    return {
        "recipe": recipe,
        "status": "running",
        "steps": 0,
        "seed": seed,
        "attempts": None,
        "resumed_from": None,
        "score": None,
        "seconds": {"setup": None, "warm_start": None, "to_first_step": None, "training": None},
        "peak_memory_bytes": None,
        "tokens_per_second": None,
        "error": None,
    }


def finish_summary(run_dir: str | Path, status: Status, error: str | None = None, **fields: Any) -> None:
    """Close summary.json, well or badly; the driver calls this when the trainer is gone.

    Where a later command failed before its trainer began, the record of the run that finished or was stopped stays.

    Args:
        run_dir: the run's folder; made if missing.
        status: how the run ended.
        error: the last line of what went wrong.
        fields: further fields, as of `Tracker.update_summary`; give `recipe` and `seed` in case the run ended
            before a tracker wrote them.
    """
    check_fields(fields)
    message = error and hide_in_text(error)
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        # A trainer that begins sets the status to running.
        if status != "finished" and json_object(Path(run_dir) / "summary.json").get("status") in (
            "finished",
            "stopped",
        ):
            return
        merge_summary(Path(run_dir), {**fields, "status": status, "error": message})
    except OSError as problem:
        logger.warning("summary.json of %s could not be written: %s", run_dir, problem)


def begin_summary(run_dir: Path, recipe: str, seed: int, resume_step: int) -> None:
    """Set the summary to running: that of the attempts before when steps are resumed, else a new one."""
    # The driver may have noted how long the warm start took; what an earlier run left here is another matter.
    if resume_step == 0 and json_object(run_dir / "summary.json").get("status") != "running":
        (run_dir / "summary.json").unlink(missing_ok=True)
    fields = {"recipe": recipe, "seed": seed, "status": "running", "error": None}
    merge_summary(run_dir, fields | {"resumed_from": resume_step or None})


def merge_summary(run_dir: Path, fields: Mapping[str, Any]) -> None:
    """Set fields of summary.json; of those that are mappings only the parts that are given."""
    summary = empty_summary(None, None) | json_object(run_dir / "summary.json")
    for name, value in fields.items():
        both = isinstance(value, Mapping) and isinstance(summary[name], Mapping)
        summary[name] = {**summary[name], **value} if both else value
    cleaned, _ = finite(plain(summary))
    write_whole(run_dir / "summary.json", json.dumps(cleaned, indent=2, allow_nan=False) + "\n")


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise ValueError for a field that a summary does not have."""
    known = empty_summary(None, None)
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ValueError(f"summary.json has no field {', '.join(unknown)}; it has {', '.join(known)}")
