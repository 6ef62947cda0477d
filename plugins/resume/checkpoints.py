"""Search of the checkpoint to resume from: the latest one that is intact, or the one that `resume` names.

This module does not import torch.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from training.run.checkpoint import LATEST, STEP_NAME, named_step, put_back, step_names, step_of
from training.run.checkpoint_digests import DIGESTS_FILE, STATE_FILE, THREADS, digest_of, files_of
from training.tracking.serialization import flat

logger = logging.getLogger(__name__)

IGNORED_CHANGES = ("run_dir", "resume", "dry_run", "print_config", "checkpoint.path", "checkpoint.export_path")
"""Options whose differences from a checkpoint are not reported."""


def find_checkpoint(resume: str, folder: str | Path, run_id: str | None = None) -> Path | None:
    """Return the step folder to resume from, or None.

    Args:
        resume: "none" returns None. "auto" selects the latest step in `folder`, or None if there is none. Any other
            value is a path: a step folder, a folder with `latest`, or a run folder with `checkpoints/latest`. If the
            latest step is damaged, the newest intact one before it is used, with a warning. If `resume` names a step
            folder and it is damaged, an error is raised.
        folder: folder of the run's checkpoints. It need not exist.
        run_id: id of the current run. If the latest step in `folder` was saved with this id, the run was restarted, and
            it resumes from there whatever `resume` says. Checkpoints of other runs are ignored in this check.

    Raises:
        ValueError: there is no checkpoint at the path, or it has no state to resume from.
    """
    if run_id is not None:
        # `resume` sets the start of the first attempt. A restart of the same run must not lose the steps since then.
        own_checkpoint = find_checkpoint("auto", folder)
        if own_checkpoint is not None and read_state(own_checkpoint).get("run_id") == run_id:
            return own_checkpoint
    if resume == "none":
        return None
    try:
        chosen = _newest_intact(Path(folder).expanduser().absolute()) if resume == "auto" else _find(resume)
    except (OSError, RuntimeError) as error:
        # pathlib raises RuntimeError for an unknown home folder and for a loop of symbolic links.
        raise ValueError(f"resume={resume} cannot be read: {error}; set resume to a step folder, or to none") from error
    # An exported model is also a step folder, but it has neither an optimizer state nor a position in the data.
    if chosen is not None and not (chosen / STATE_FILE).is_file():
        raise ValueError(
            f"resume={resume}: {chosen} holds a model but no state to resume from (no {STATE_FILE}); set resume to "
            "another checkpoint, or to none"
        )
    return chosen


def check_resume(resume: str, folder: str | Path) -> None:
    """Check, before a run starts, that it can resume as `resume` says or start in an empty `folder`.

    Raises:
        ValueError: see `find_checkpoint`. Also if `resume` is "none" and `folder` already holds checkpoints.
    """
    if resume != "none":
        find_checkpoint(resume, folder)
    # A new run would replace these checkpoints one by one, and a mix of two runs would remain.
    elif (latest := find_checkpoint("auto", folder)) is not None:
        raise ValueError(
            f"{folder} holds checkpoints already, up to {latest.name}; set resume=auto to resume from there, or name "
            "another folder"
        )


def read_state(step_folder: Path) -> dict[str, Any]:
    """Read the `state` that `save` wrote. Tuples come back as lists, and floats with the same bits.

    Raises:
        ValueError: state/trainer.json is missing or is no JSON object.
    """
    file = step_folder / STATE_FILE
    advice = "resume from another checkpoint, or set resume to none"
    try:
        return dict(json.loads(file.read_bytes()))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}; {advice}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON object: {error}; {advice}") from error


def changed_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the options that differ, one line each: "train.learning_rate: 1e-06 -> 2e-06".

    The lines are in the order of `now`, followed by options that only `before` has. IGNORED_CHANGES are left out.

    Args:
        before: options of the checkpoint, as `read_state` returns them.
        now: options of this run as plain values, as `redact` returns them.
    """
    # Compared as text, because NaN differs from itself and would be reported as a change.
    old = {name: repr(value) for name, value in flat(before).items()}
    new = {name: repr(value) for name, value in flat(now).items()}
    lines = []
    for name in dict.fromkeys([*new, *old]):
        left = old.get(name, "(not set)")
        right = new.get(name, "(not set)")
        if name not in IGNORED_CHANGES and left != right:
            lines.append(f"{name}: {left} -> {right}")
    return lines


def damage(folder: Path) -> str | None:
    """Compare the files of a checkpoint with their digests.

    Returns:
        A description of the first difference, or None if there is none. Files that were added later are ignored.
    """
    files = [*files_of(folder), str(DIGESTS_FILE)]
    if not (folder / DIGESTS_FILE).is_file():
        # A folder without a state is an exported model. No run resumes from it, so missing digests are no damage.
        return f"{DIGESTS_FILE} is missing" if (folder / STATE_FILE).exists() else None
    facts = []
    for name in files:
        fact = (folder / name).stat()
        facts.append((name, fact.st_size, fact.st_mtime_ns))
    # The checks before a run and the trainer request the same checkpoint, and digests take seconds per GB.
    return _damage(folder, tuple(facts))


def _find(resume: str) -> Path:
    path = Path(resume).expanduser().absolute()
    # A step folder may be a symbolic link to storage elsewhere. Resolved, it could lose its name step_N.
    if not STEP_NAME.fullmatch(path.name):
        path = path.resolve()
    # An empty text would be the current directory, which may hold the checkpoints of another run.
    if resume.strip() and STEP_NAME.fullmatch(path.name) and put_back(path):
        _refuse_damage(resume, path)
        return path
    if resume.strip() and (step_folder := _newest_intact(path) or _newest_intact(path / "checkpoints")):
        return step_folder
    raise ValueError(
        f"resume={resume}: there is no checkpoint; looked for a step folder at {path}, for {path / LATEST} and for "
        f"{path / 'checkpoints' / LATEST}; set resume to one of these, to auto or to none"
    )


def _newest_intact(root: Path) -> Path | None:
    """Return the step that `latest` names.

    If it is damaged, the newest intact step before it is returned, and if there is no `latest`, the newest intact step.
    Both cases log a warning.
    """
    latest = named_step(root, LATEST)
    if latest is None:
        intact = _intact_before(root)
        if intact is not None:
            logger.warning(
                "%s is missing or empty; resuming from %s, the newest intact step", root / LATEST, intact.name
            )
        return intact
    fault = damage(latest)
    if fault is None:
        return latest
    intact = _intact_before(root, step_of(latest))
    if intact is None:
        raise ValueError(
            f"{latest} is damaged: {fault}; there is no intact checkpoint before it; restore its files, or set "
            "resume=none and another run_dir"
        )
    logger.warning("%s is damaged: %s; resuming from %s, the newest intact step before it", latest, fault, intact.name)
    return intact


def _refuse_damage(resume: str, folder: Path) -> None:
    fault = damage(folder)
    if fault is not None:
        advice = "there is no intact checkpoint before it"
        if intact := _intact_before(folder.parent, step_of(folder)):
            advice = f"set resume={intact}, the newest intact one before it"
        raise ValueError(f"resume={resume} is damaged: {fault}; {advice}")


def _intact_before(root: Path, step: float = math.inf) -> Path | None:
    """Return the newest intact step below `step` that has a state to resume from, or None."""
    earlier = [root / name for name in step_names(root) if step_of(root / name) < step]
    # Lazily, because the digests of a checkpoint take seconds per GB, and the first intact checkpoint is enough.
    intact = (path for path in reversed(earlier) if (path / STATE_FILE).is_file() and damage(path) is None)
    return next(intact, None)


@functools.lru_cache(maxsize=16)
def _damage(folder: Path, files: tuple[tuple[str, int, int], ...]) -> str | None:
    """See `damage`. The result is cached by size and modification time, so unchanged files are read only once."""
    written = _json_in(folder / DIGESTS_FILE)
    if written is None:
        return f"{DIGESTS_FILE} is no JSON object"
    missing = sorted(written.keys() - {name for name, _, _ in files})
    if missing:
        return f"{missing[0]} is missing"
    # A thread that waits for the disk does not hold the interpreter lock, so several files are read at once.
    with ThreadPoolExecutor(THREADS) as pool:
        digests = pool.map(lambda name: digest_of(folder / name), written)
        changed = [name for name, digest in zip(written, digests, strict=True) if digest != written[name]]
    if changed:
        return f"the content of {changed[0]} has changed since it was written"
    return None


def _json_in(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if there is none."""
    try:
        content = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
