"""summary.json: the result of a run on one page. The trainer updates it during the run, and the driver completes it."""

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
    """Return the summary of a run before its first step.

    `attempts` is the number of times that its processes were started. `resumed_from` is the step after which the last
    attempt continued, or None if it started from the beginning.
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
    """Write the status of a run that has ended to summary.json. The driver calls it after the trainer has ended.

    If a second command in the same folder failed before its trainer started, the record of the first run is kept.

    Args:
        run_dir: run folder. It is created if it does not exist.
        status: status at the end of the run.
        error: last line of the error message.
        fields: other fields, as for `Tracker.update_summary`. Include `recipe` and `seed`, because the run may have
            ended before a tracker wrote them.
    """
    check_fields(fields)
    message = error and hide_in_text(error)
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        before = json_object(Path(run_dir) / "summary.json").get("status")
        # A trainer sets the status to "running" when it starts. Any other status is that of an earlier run.
        if status != "finished" and before in ("finished", "stopped"):
            return
        merge_summary(Path(run_dir), {**fields, "status": status, "error": message})
    except OSError as problem:
        logger.warning("summary.json of %s could not be written: %s", run_dir, problem)


def begin_summary(run_dir: Path, recipe: str, seed: int, resume_step: int) -> None:
    """Set the status to "running". Keep the summary of earlier attempts if the run resumes, else replace it."""
    # A summary that is already "running" was begun by the driver of this run, with the time of the warm start.
    if resume_step == 0 and json_object(run_dir / "summary.json").get("status") != "running":
        (run_dir / "summary.json").unlink(missing_ok=True)
    fields = {"recipe": recipe, "seed": seed, "status": "running", "error": None}
    merge_summary(run_dir, fields | {"resumed_from": resume_step or None})


def merge_summary(run_dir: Path, fields: Mapping[str, Any]) -> None:
    """Set fields of summary.json. Of a field that is a mapping, keys that are not in `fields` keep their values."""
    summary = empty_summary(None, None) | json_object(run_dir / "summary.json")
    for name, value in fields.items():
        if isinstance(value, Mapping) and isinstance(summary[name], Mapping):
            summary[name] = {**summary[name], **value}
        else:
            summary[name] = value
    # JSON has no NaN, so the loss of a diverged run is null in the file.
    cleaned, _ = finite(plain(summary))
    write_whole(run_dir / "summary.json", json.dumps(cleaned, indent=2, allow_nan=False) + "\n")


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise ValueError for a field that a summary does not have."""
    known = empty_summary(None, None)
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ValueError(f"summary.json has no field {', '.join(unknown)}; it has {', '.join(known)}")
