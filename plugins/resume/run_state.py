"""Restoring of the parts of a trainer from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.batch.reading import load_batch
from plugins.resume.checkpoints import changed_options, find_checkpoint, read_state
from plugins.resume.continuation import Continued
from training.run.progress import BATCH_FILE, BATCHES, UNRECORDED, RunCheckpoints
from training.run.strategies import GROUPS


def load_run(
    checkpoints: RunCheckpoints, resume: str, left: Callable[[], int] | None
) -> tuple[Path, dict[str, Any]] | None:
    """Restore the parts of a run. See `RunCheckpoints.load`, which calls this if there may be a checkpoint."""
    folder = find_checkpoint(resume, checkpoints.store.folder, checkpoints.run_id)
    if folder is None:
        return None
    saved = read_state(folder)
    parts: dict[str, Any] = {"stream": checkpoints.stream, **checkpoints.stream.sources, **checkpoints.parts}
    # Checked before any part is restored, so that an error leaves no run that is restored by half.
    missing = sorted(set(parts) - set(saved) - {GROUPS})
    if missing:
        raise ValueError(
            f"{folder} holds no state of {', '.join(missing)}: another recipe or version wrote it; set resume=none "
            "and another run_dir"
        )
    saved = _with_batches(saved, folder / BATCHES)
    if saved.get(GROUPS) and GROUPS not in parts:
        raise Continued(folder, saved, ()).unfinished_groups(len(saved[GROUPS]["steps"]))
    for name, part in parts.items():
        part.load_state_dict(saved.get(name, {}))
    if (unrecorded := saved.get(UNRECORDED)) is not None:
        checkpoints.unrecorded = unrecorded["batch"], unrecorded["metrics"]
    stream = checkpoints.stream
    if left is not None:
        stream.steps = stream.step + stream.queued + left()
    # It stays 0 for the checkpoint of another run, so that `save` still writes one into the folder of this run.
    if folder.parent.samefile(checkpoints.store.folder):
        checkpoints.saved_step = stream.step
    checkpoints.info(f"resumes after step {stream.step} of {stream.steps}, from {folder}")
    for change in changed_options(saved["config"], checkpoints.config):
        checkpoints.info(f"changed since that checkpoint: {change}")
    return folder, saved


def _with_batches(value: Any, folder: Path) -> Any:
    """Replace the file names of a state by the batches, read from `folder`."""
    if isinstance(value, list):
        return [_with_batches(item, folder) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {BATCH_FILE}:
        return load_batch(folder / value[BATCH_FILE])
    return {key: _with_batches(item, folder) for key, item in value.items()}
