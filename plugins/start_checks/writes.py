"""Checks of the writes that a run makes late: a trial export, and the free space of every disk that it writes to.

For the model of a demonstration, nothing here imports torch. Other models were read before, which imports it.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.models.size import model_size
from components.models.sources import is_made
from components.net.hub import first_line
from components.net.hub_requests import find_model
from core.shared_memory import SHARED_MEMORY
from training.run.checkpoint import Checkpoints, disk_fault
from training.run.checkpoint_size import WEIGHT_BYTES, checkpoint_bytes

if TYPE_CHECKING:
    from training.options.model_options import ModelOptions

FILES_BYTES = 1_000_000
"""Lower limit for the size of logs, metrics and rollouts of a run, in bytes."""
TEMPORARY_BYTES = 10_000_000
"""Space for temporary files, in bytes."""


@dataclass(frozen=True)
class _Need:
    """Space that a run needs in a folder."""

    folder: Path
    size: int
    what: str
    advice: str


def check_writes(config: Any, exported: ModelOptions | None, steps: int | None) -> list[str]:
    """Try an export of the initial model, and check that the disks have space for the files of the run.

    Args:
        config: resolved options of the run. Its run_dir exists.
        exported: model that the run exports. No export is tried for None and for the model of a demonstration.
        steps: number of steps of the run, or None if it is not known.

    Returns:
        Notes for the user.

    Raises:
        ValueError: a write fails, or a disk has too little space. The message says what to set.
    """
    _check_space(config, steps)
    store = config.checkpoint.store(config.run_dir)
    if exported is None or is_made(exported.path):
        return []
    dropped: list[str] = []
    try:
        try_write(store, lambda folder: dropped.extend(_export(exported, folder / "hf")))
    except ValueError as error:
        raise ValueError(f"model.path={exported.path} cannot be exported: {error}") from error
    if not dropped:
        return []
    flags = ", ".join(dropped)
    return [f"{flags} of generation_config.json are not exported: transformers refuses to save them with the others"]


def try_write(store: Checkpoints, write: Callable[[Path], object]) -> None:
    """Write a trial folder beside the steps of a run, and remove it.

    Args:
        store: checkpoints of the run.
        write: fills the folder that it receives. Its path is as long as that of a step.

    Raises:
        ValueError: the disk is full, read-only or not writable. Other errors of `write` are raised unchanged.
    """
    # Beside the steps and with a name as long as theirs, so that it meets the same disk and the same path limit.
    probe = store.folder / ".probe.partial"
    try:
        probe.mkdir()
        write(probe)
    except Exception as error:
        fault = disk_fault(error, store.folder)
        if fault is None:
            raise
        raise ValueError(f"a trial export could not be written to {store.folder}: {fault}") from error
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _export(model: ModelOptions, folder: Path) -> list[str]:
    """Write the settings and the tokenizer of a model. Return the names of settings that cannot be exported."""
    from components.models.disk.empty_model import generation_config
    from components.models.disk.settings import save_settings

    folder.mkdir()
    tokenizer = model.tokenizer()
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        # A full or read-only disk, which `try_write` reports with a remedy.
        raise
    except Exception as error:  # classes of tokenizers may raise any error
        raise ValueError(f"its tokenizer cannot be saved: {first_line(error)}") from error
    try:
        settings = generation_config(model.path)
    except Exception as error:  # transformers checks the values of the file, but not that it is a JSON object
        raise ValueError(f"its generation_config.json cannot be used: {first_line(error)}") from error
    return save_settings(folder, find_model(model.path), settings)


def _check_space(config: Any, steps: int | None) -> None:
    """Check that every disk has space for all files that the run writes to it.

    Raises:
        ValueError: a disk has too little free space.
    """
    run_dir = Path(config.run_dir)
    checkpoint = config.checkpoint
    checkpoint_size = checkpoint_bytes(config)
    folder = Path(checkpoint.path or run_dir / "checkpoints").expanduser()
    # Checkpoints that exist already are part of the used space.
    count = max(1, _most_checkpoints(checkpoint, checkpoint_size, steps) - len(list(folder.glob("step_*"))))
    what = f"checkpoints ({count} x {_megabytes(checkpoint_size)})"
    advice = "checkpoint.path or run_dir to a folder on a larger disk, or checkpoint.keep or checkpoint.max_gb lower"
    needs = [
        _Need(run_dir, FILES_BYTES, "logs and metrics", "run_dir to a folder on a larger disk"),
        _Need(folder, count * checkpoint_size, what, advice),
        _Need(Path(tempfile.gettempdir()), TEMPORARY_BYTES, "temporary files", "TMPDIR to a folder on a larger disk"),
    ]
    if checkpoint.export_path and (size := model_size(config.model.path)):
        export = Path(checkpoint.export_path).expanduser()
        weights = size.parameters * WEIGHT_BYTES.get(config.train.precision, 4)
        needs.append(_Need(export, weights, "the exported model", "checkpoint.export_path to a folder on another disk"))
    if hasattr(config, "rollout"):
        needs += _published(config, run_dir)
    # Folders of one disk share its free space, so their sizes are added before they are compared with it.
    by_disk: dict[int, list[_Need]] = {}
    for need in needs:
        by_disk.setdefault(_existing_folder(need.folder).stat().st_dev, []).append(need)
    for needs_of_disk in by_disk.values():
        _check_disk(needs_of_disk)
    if checkpoint.export_path:
        _check_writable(Path(checkpoint.export_path).expanduser(), "checkpoint.export_path")


def _most_checkpoints(checkpoint: Any, checkpoint_size: int, steps: int | None) -> int:
    """Return the maximum number of checkpoints on the disk at the same time, including the one being written."""
    written = 1 if checkpoint.every < 1 or steps is None else max(1, math.ceil(steps / checkpoint.every))
    kept = checkpoint.keep
    if checkpoint.max_gb is not None and checkpoint_size:
        kept = min(kept, max(1, int(checkpoint.max_gb * 1e9 // checkpoint_size)))
    # One more than is kept: the oldest is removed only when the new one is complete.
    return min(written, kept + 1)


def _published(config: Any, run_dir: Path) -> list[_Need]:
    """Return the space in the run folder for two versions of the published weights, if shared memory is too small."""
    size = model_size(config.model.path)
    if size is None or config.rollout.weight_sync not in ("shared_memory", "auto"):
        return []
    # Two versions: engines still read the last one while the next one is written.
    weights = 2 * size.parameters * WEIGHT_BYTES.get(config.train.precision, 4)
    with suppress(OSError):
        if shutil.disk_usage(SHARED_MEMORY).free >= weights:
            return []
    advice = "run_dir to a folder on a larger disk, or enlarge the shared memory (docker: --shm-size)"
    return [_Need(run_dir, weights, "weights for the rollout engines, as /dev/shm is too small for them", advice)]


def _check_disk(needs: list[_Need]) -> None:
    free = shutil.disk_usage(_existing_folder(needs[0].folder)).free
    total = sum(need.size for need in needs)
    if total <= free:
        return
    largest = max(needs, key=lambda need: need.size)
    parts = ", ".join(f"{_megabytes(need.size)} for {need.what} in {need.folder}" for need in needs if need.size)
    raise ValueError(
        f"there is too little space: {_megabytes(free)} are free on the disk of {largest.folder}, and the run writes "
        f"at least {_megabytes(total)} to it ({parts}); free space, or set {largest.advice}"
    )


def _check_writable(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{option}={folder} cannot be written to: {error.strerror}; set another folder") from error


def _existing_folder(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _megabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
