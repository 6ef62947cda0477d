"""Step folders of a run: written aside, renamed when whole, and named by `latest`. Nothing here needs torch.

<run_dir>/checkpoints/step_12/hf/    a model that from_pretrained loads
<run_dir>/checkpoints/latest         the text "step_12"
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

LATEST = "latest"
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
    _write_latest(root, folder.name)
    return folder / "hf"


def latest_step(run_dir: str | Path) -> Path | None:
    """Find the step folder that `latest` names; None when nothing was exported yet."""
    root = Path(run_dir) / "checkpoints"
    try:
        name = (root / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    folder = root / name
    if not _STEP.fullmatch(name) or not folder.is_dir():
        raise ValueError(
            f"{root / LATEST} names {name!r}, which is no step folder here; write one of {_steps(root)} into it, or "
            "remove it to start anew"
        )
    return folder


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
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    target.rename(old)
    source.rename(target)
    shutil.rmtree(old)


def _write_latest(root: Path, name: str) -> None:
    aside = root / f".{LATEST}.partial"
    with aside.open("w", encoding="utf-8") as file:
        file.write(name + "\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(root / LATEST)


def _steps(root: Path) -> list[str]:
    names = [path.name for path in root.iterdir() if _STEP.fullmatch(path.name)]
    return sorted(names, key=lambda name: step_of(Path(name)))
