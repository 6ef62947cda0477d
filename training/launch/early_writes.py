"""Writes that a run makes late, tried before it starts: an export, and the space on every disk that it writes to.

Nothing here needs torch for a demonstration's model; one of the user's own has been read by then, which takes it too.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.models.size import model_size
from components.models.sources import is_made
from components.net.hub import find_model, first_line
from core.shared_memory import SHARED_MEMORY

if TYPE_CHECKING:
    from training.options.model_options import ModelOptions
    from training.options.run_options import RunOptions

FILES_BYTES = 1_000_000
"""Space for logs, metrics and rollouts of a run, beside its checkpoints; a lower limit."""
TEMPORARY_BYTES = 10_000_000
"""Space for temporary files."""
STATE_BYTES = 12
"""Bytes of a trained parameter in a checkpoint: its float32 value and the two moments of AdamW."""


@dataclass(frozen=True)
class _Need:
    """What a run writes to one folder."""

    folder: Path
    size: int
    what: str
    advice: str


def check_writes(config: Any, exported: ModelOptions | None, steps: int | None) -> list[str]:
    """Try an export of the model as it is, and see that the disks have space for what the run will write.

    Args:
        config: of the run, with everything filled in; its run_dir exists.
        exported: the model that the run exports; None, or a demonstration's: no export is tried.
        steps: of the run, where they are known.

    Returns:
        Notes for the user.

    Raises:
        ValueError: something cannot be written; the message says what to set.
    """
    _check_space(config, steps)
    store = config.checkpoint.store(config.run_dir)
    if exported is None or is_made(exported.path):
        return []
    dropped: list[str] = []
    try:
        store.try_write(lambda folder: dropped.extend(_export(exported, folder / "hf")))
    except ValueError as error:
        raise ValueError(f"model.path={exported.path} cannot be exported: {error}") from error
    if not dropped:
        return []
    flags = ", ".join(dropped)
    return [f"{flags} of generation_config.json are not exported: transformers refuses to save them with the others"]


def _export(model: ModelOptions, folder: Path) -> list[str]:
    """Write the settings and the tokenizer of a model; the names of the settings that are left out."""
    from components.models.disk.empty_model import generation_config
    from components.models.disk.settings import save_settings

    folder.mkdir()
    tokenizer = model.tokenizer()
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # a tokenizer's class may raise anything
        raise ValueError(f"its tokenizer cannot be saved: {first_line(error)}") from error
    try:
        settings = generation_config(model.path)
    except Exception as error:  # transformers checks the file's values, not what kind of JSON it is
        raise ValueError(f"its generation_config.json cannot be used: {first_line(error)}") from error
    return save_settings(folder, find_model(model.path), settings)


def checkpoint_bytes(config: RunOptions) -> int:
    """Return a lower limit for the size of a checkpoint: weights, optimizer and export. 0: not known."""
    own: Any = config
    train = own.train
    size = model_size(own.model.path)
    if size is None:
        return 0
    export = size.parameters * (2 if train.precision == "bf16" else 4)
    if getattr(train, "lora_rank", 0):
        return export  # adapters alone are trained, and small
    trained = size.parameters
    if getattr(own, "needs_critic", False):
        critic = model_size(own.critic.path) if own.critic.path else size
        trained += 0 if critic is None else critic.without_head.parameters
    average = 4 * size.parameters if getattr(train, "ema_beta", None) else 0
    return export + STATE_BYTES * trained + average


def _check_space(config: Any, steps: int | None) -> None:
    """See that every disk has space for all that is written to it.

    Raises:
        ValueError: one has not.
    """
    run_dir, checkpoint = Path(config.run_dir), config.checkpoint
    one = checkpoint_bytes(config)
    folder = Path(checkpoint.path).expanduser() if checkpoint.path else run_dir / "checkpoints"
    count = max(1, _most_checkpoints(checkpoint, one, steps) - _existing(folder))
    what = f"{count} checkpoints of {_megabytes(one)} each" if count > 1 else f"a checkpoint of {_megabytes(one)}"
    advice = "checkpoint.path or run_dir to a folder on a larger disk, or checkpoint.keep or checkpoint.max_gb lower"
    needs = [
        _Need(run_dir, FILES_BYTES, "logs and metrics", "run_dir to a folder on a larger disk"),
        _Need(folder, count * one, what, advice),
        _Need(Path(tempfile.gettempdir()), TEMPORARY_BYTES, "temporary files", "TMPDIR to a folder on a larger disk"),
    ]
    if checkpoint.export_path:
        export = Path(checkpoint.export_path).expanduser()
        size = model_size(config.model.path)
        weights = size.parameters * (2 if config.train.precision == "bf16" else 4) if size else 0
        needs.append(_Need(export, weights, "the exported model", "checkpoint.export_path to a folder on another disk"))
    if hasattr(config, "rollout"):
        needs += _published(config, run_dir)
    by_disk: dict[int, list[_Need]] = {}
    for need in needs:
        by_disk.setdefault(_existing_folder(need.folder).stat().st_dev, []).append(need)
    for own in by_disk.values():
        _check_disk(own)
    if checkpoint.export_path:
        _check_writable(Path(checkpoint.export_path).expanduser(), "checkpoint.export_path")


def _most_checkpoints(checkpoint: Any, one: int, steps: int | None) -> int:
    """Return how many checkpoints are on the disk at the same time, the one being written included."""
    written = 1 if checkpoint.every < 1 or steps is None else max(1, math.ceil(steps / checkpoint.every))
    kept = checkpoint.keep
    if checkpoint.max_gb is not None and one:
        kept = min(kept, max(1, int(checkpoint.max_gb * 1e9 // one)))
    # The oldest is removed once the new one is whole.
    return min(written, kept + 1)


def _existing(folder: Path) -> int:
    """Return the number of checkpoints of an earlier part of the run, whose space is taken already."""
    return len(list(folder.glob("step_*"))) if folder.is_dir() else 0


def _published(config: Any, run_dir: Path) -> list[_Need]:
    """Return where two versions of the policy's weights lie for the engines: in shared memory, else in the run."""
    size = model_size(config.model.path)
    if size is None or config.rollout.weight_sync not in ("shared_memory", "auto"):
        return []
    weights = 2 * size.parameters * (2 if config.train.precision == "bf16" else 4)
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
        f"{_megabytes(total)} to it at least ({parts}); free space, or set {largest.advice}"
    )


def _check_writable(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{option}={folder} cannot be written to: {error.strerror}; set another folder") from error


def _existing_folder(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _megabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
