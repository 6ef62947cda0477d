"""Step folders of a run: written aside, renamed when whole, and named by `latest`. Nothing here needs torch.

<run_dir>/checkpoints/step_12/hf/    a model that from_pretrained loads
<run_dir>/checkpoints/latest         the text "step_12"
<run_dir>/checkpoints/best           the text "step_9", where a run marks its best step
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

LATEST = "latest"
BEST = "best"
_STEP = re.compile(r"step_(\d+)")


def export_step(run_dir: str | Path, step: int, write: Callable[[Path], object]) -> Path:
    """Write the model of one step and make it the latest.

    A reader sees the folder of a step whole or not at all, whenever this process dies. A folder of the same
    step, from before a resume, is replaced.

    Args:
        run_dir: the run's folder.
        step: the step that was finished last.
        write: fills the folder it is given; it exists and is empty. It may call the ranks of a train role.

    Returns:
        `<run_dir>/checkpoints/step_<step>/hf`.
    """
    if step < 0:
        raise ValueError(f"step={step} is negative; count the steps from 0")
    root = Path(run_dir) / "checkpoints"
    folder = root / f"step_{step}"
    aside = root / f".step_{step}.partial"
    # What lies here is from a process that died in the middle: only one process of a run exports.
    shutil.rmtree(aside, ignore_errors=True)
    (aside / "hf").mkdir(parents=True)
    try:
        write(aside / "hf")
        if not any((aside / "hf").iterdir()):
            raise ValueError(f"nothing was written for step {step}; write(path) must fill the folder it is given")
        _replace_folder(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    _write_name(root, LATEST, folder.name)
    return folder / "hf"


def latest_step(run_dir: str | Path) -> Path | None:
    """Find the step folder that `latest` names; None when nothing was exported yet."""
    root = Path(run_dir) / "checkpoints"
    name = _read_name(root, LATEST)
    if name is None:
        return None
    folder = root / name
    if not _STEP.fullmatch(name) or not folder.is_dir():
        raise ValueError(
            f"{root / LATEST} names {name!r}, which is no step folder here; write one of {_steps(root)} into it, or "
            "remove it to start anew"
        )
    return folder


def mark_best(run_dir: str | Path, step: int) -> None:
    """Let `best` name this step, and remove the folder of the step that was best before, unless it is the latest.

    Whenever this process dies, `best` names a whole folder: the old one goes after the new one has the name.

    Raises:
        ValueError: the step was not exported.
    """
    root = Path(run_dir) / "checkpoints"
    name = f"step_{step}"
    if not (root / name).is_dir():
        raise ValueError(
            f"{root} has no {name} to mark as the best, only {_steps(root)}; export the step before it is marked"
        )
    before = _read_name(root, BEST)
    _write_name(root, BEST, name)
    if before is not None and _STEP.fullmatch(before) and before not in (name, _read_name(root, LATEST)):
        _remove_folder(root / before)


def step_of(folder: Path) -> int:
    """Read the step's number off its folder."""
    match = _STEP.fullmatch(folder.name)
    assert match is not None, folder
    return int(match.group(1))


def _replace_folder(source: Path, target: Path) -> None:
    if not target.exists():
        source.rename(target)
        return
    # A folder cannot be renamed over a full one. Between these two lines the step is missing, never half.
    old = _set_aside(target)
    source.rename(target)
    shutil.rmtree(old)


def _remove_folder(folder: Path) -> None:
    if folder.is_dir():
        # Under its own name it would be seen by halves while it goes.
        shutil.rmtree(_set_aside(folder))


def _set_aside(folder: Path) -> Path:
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    return folder.rename(old)


def _read_name(root: Path, file: str) -> str | None:
    try:
        return (root / file).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def _write_name(root: Path, file: str, name: str) -> None:
    aside = root / f".{file}.partial"
    with aside.open("w", encoding="utf-8") as stream:
        stream.write(name + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(root / file)


def _steps(root: Path) -> list[str]:
    names = [path.name for path in root.glob("step_*") if _STEP.fullmatch(path.name)]
    return sorted(names, key=lambda name: step_of(Path(name)))
