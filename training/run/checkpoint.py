"""Checkpoints of a run. Each is written to a hidden folder, renamed once it is complete, and then named by `latest`.

This module does not import torch.

<folder>/step_12/state/trainer.json   the trainer's own state, plain JSON
<folder>/step_12/state/<role>/...     training state of the ranks of a role
<folder>/step_12/state/digests.json  digests of all files of the step, to detect damage
<folder>/step_12/hf/                  a model that from_pretrained loads
<folder>/latest                       the text "step_12"
<folder>/best                         the text "step_9", where a run marks its best step

Hidden names belong to a write in progress, or to one whose process was killed. The next writer removes them:

.step_12.partial   being written
.step_12.gone      being removed
.step_12.old       complete checkpoint from before a resume, until the new step_12 has replaced it. It is renamed back
                   if there is no step_12
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from components.process.system_errors import system_error_number
from training.run.checkpoint_digests import STATE_FILE, Digests

logger = logging.getLogger(__name__)

LATEST = "latest"
BEST = "best"

STEP_NAME = re.compile(r"step_(\d+)")
_LEFTOVER = re.compile(r"\.(step_\d+|latest|best|probe)\.(partial|gone|old)")
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable"),
    errno.EFBIG: "raise the limit for a file (ulimit -f)",
}
"""Remedy for each error number of the file system."""


class CheckpointError(OSError):
    """Raised when a checkpoint cannot be written. Earlier ones stay intact. The message is one line for the user."""


class Checkpoints:
    """The checkpoints of one run: `<folder>/step_12/{state,hf}`, `latest`, `best`. Only one process may write.

    Writes are atomic: if the process dies at any point, a reader sees each step either complete or not at all, and
    `latest` and `best` name complete steps.

    Args:
        folder: folder of the steps. It is created if it does not exist.
        keep: number of newest steps to keep, at least 1. The best step is kept in addition.
        max_bytes: maximum size of all steps together. The latest and the best step are kept even if they exceed it.
        least_bytes: lower limit for the size of a step in bytes, or 0 if it is not known.

    Raises:
        ValueError: the folder cannot be created or written to.
    """

    def __init__(self, folder: str | Path, keep: int = 3, max_bytes: float = math.inf, least_bytes: int = 0) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.keep = keep
        self.max_bytes = max_bytes
        self.least_bytes = least_bytes
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            # Permission bits do not show a read-only or a full disk. Only an attempt to write does, and without it the
            # first checkpoint would fail after hours of training.
            probe = self.folder / ".probe.partial"
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            raise ValueError(
                f"checkpoints cannot be written to {self.folder}: {error.strerror or error}; set another checkpoint "
                "folder, or run_dir"
            ) from error

    def save(self, step: int, state: Mapping[str, Any], write: Callable[[Path], object]) -> Path:
        """Write the checkpoint of a step, make it the latest, and remove steps beyond the limits.

        A folder of the same step from before a resume is replaced. If the write fails, its files are removed, and
        `latest` and all complete steps stay as they were.

        Args:
            step: number of the last finished step.
            state: numbers, strings, lists and mappings for state/trainer.json; the plug-in `resume` reads them.
            write: writes `state/<role>/...` and `hf/...` into the folder that it receives, which has an empty `state`.
                It may call the ranks of a role.

        Returns:
            The folder of the step.

        Raises:
            ValueError: the state holds a value that JSON cannot represent.
            CheckpointError: the disk is full, read-only or not writable. Other errors of `write` are raised unchanged.
        """
        _check_json(state, "state")
        # NaN and Infinity are written as such: not standard JSON, but Python reads them back, and a loss may be NaN.
        text = json.dumps(dict(state)) + "\n"
        aside = self.folder / f".step_{step}.partial"
        try:
            self._sweep()
            self._check_space()
            (aside / "state").mkdir(parents=True)
            write(aside)
            (aside / STATE_FILE).write_text(text, encoding="utf-8")
            # The digests are computed in threads while the files are synced, so that neither waits for the other.
            digests = Digests(aside)
            _sync_tree(aside)
            _sync(digests.write())
            _sync(aside / "state")
            folder = self._commit(aside, f"step_{step}")
        except Exception as error:
            fault = disk_fault(error, self.folder)
            if fault is None:
                raise
            raise self._error(f"checkpoint of step {step} could not be written to {self.folder}", fault) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        # Only now, so that a failed write never costs an older checkpoint.
        self.prune()
        return folder

    def mark_best(self, step: int) -> None:
        """Mark a step as the best. The previous best step is removed if it is beyond the limits.

        Raises:
            ValueError: there is no checkpoint of the step.
            CheckpointError: the file `best` could not be written. The previous best step stays marked.
        """
        name = f"step_{step}"
        if not (self.folder / name).is_dir():
            raise ValueError(
                f"{name} cannot be marked as the best, because {self.folder} only has {step_names(self.folder)}; save "
                "the step first"
            )
        try:
            self._write_aside(BEST, name).replace(self.folder / BEST)
            # A rename is on the disk only once its folder is synced. Without it, a power cut may undo the mark.
            _sync(self.folder)
        except OSError as error:
            fault = disk_fault(error, self.folder) or str(error)
            raise self._error(f"step {step} could not be marked as the best in {self.folder}", fault) from error
        self.prune()

    def latest(self) -> Path | None:
        """Return the step folder that `latest` names, or None if there is no checkpoint yet.

        Raises:
            ValueError: `latest` names a folder that does not exist.
        """
        return named_step(self.folder, LATEST)

    def best(self) -> Path | None:
        """Return the step folder that `best` names, or None; see `latest`."""
        return named_step(self.folder, BEST)

    def prune(self) -> None:
        """Remove the oldest steps beyond the limits, but never the latest or the best.

        Steps with a higher number than the latest are from before a resume from an older step. The run does not
        continue from them, so they count as the oldest. A folder that cannot be removed causes only a warning.
        """
        latest = _read_name(self.folder, LATEST)
        safe = {latest, _read_name(self.folder, BEST)}
        names = step_names(self.folder)
        if latest in names:
            after = names.index(latest) + 1
            names = names[after:] + names[:after]
        over = set(names[: -self.keep])
        # Each size takes a system call per file, so without a limit none is read and the sum stays 0.
        size = {name: _bytes_of(self.folder / name) for name in names if self.max_bytes < math.inf}
        for name in names:
            is_over = name in over or sum(size.values()) > self.max_bytes
            if is_over and name not in safe and _remove(self.folder / name):
                size.pop(name, None)

    def _check_space(self) -> None:
        """Raise the OSError of a full disk if a step cannot fit, before minutes are spent on writing a part of it."""
        latest = self.folder / (_read_name(self.folder, LATEST) or LATEST)
        # Half, because the latest step may also hold queued batches, which the next one may not have.
        needed = self.least_bytes or _bytes_of(latest) // 2
        if shutil.disk_usage(self.folder).free < needed:
            advice = "it takes {:.1f} MB at least; lower checkpoint.keep or checkpoint.max_gb"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {advice.format(needed / 1e6)}")

    def _commit(self, aside: Path, name: str) -> Path:
        """Rename the complete folder and make it the latest. Both are undone if one of them fails."""
        target = self.folder / name
        old = self.folder / f".{name}.old"
        # Written before the first rename, so that a full disk cannot stop the commit halfway.
        pointer = self._write_aside(LATEST, name)
        try:
            # A folder cannot be renamed onto one that is not empty. If the process is killed between the two renames,
            # `put_back` restores the old folder.
            if target.exists():
                target.rename(old)
            aside.rename(target)
            _sync(self.folder)
            pointer.replace(self.folder / LATEST)
        except OSError:
            # Undone in reverse order. `save` then removes `aside`, and the run continues with the old checkpoints.
            if not aside.exists():
                target.rename(aside)
            if old.exists():
                old.rename(target)
            pointer.unlink(missing_ok=True)
            raise
        _sync(self.folder)
        if old.exists():
            _remove(old)
        return target

    def _write_aside(self, file: str, name: str) -> Path:
        aside = self.folder / f".{file}.partial"
        try:
            with aside.open("w", encoding="utf-8") as stream:
                stream.write(name + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        return aside

    def _sweep(self) -> None:
        """Remove the files of writes that did not finish, and restore steps that were being replaced."""
        for path in sorted(self.folder.iterdir()):
            if not _LEFTOVER.fullmatch(path.name):
                continue
            step = path.with_name(path.stem.removeprefix("."))
            # The writer was killed between the two renames of `_commit`: the old folder is the only complete one.
            if path.suffix == ".old" and not step.is_dir():
                path.rename(step)
            else:
                _remove(path)

    def _error(self, what: str, fault: str) -> CheckpointError:
        name = _read_name(self.folder, LATEST)
        last = f"the last complete one is {name}" if name in step_names(self.folder) else "there is no complete one yet"
        return CheckpointError(f"{what}: {fault}; {last}")


def may_resume(resume: str, folder: Path) -> bool:
    """Return True if a run resumes from a checkpoint: `resume` is a path, or the folder of its checkpoints has one."""
    return resume not in ("auto", "none") or (folder / LATEST).exists() or bool(step_names(folder))


def step_of(folder: Path) -> int:
    """Return the step number in the name of a step folder."""
    match = STEP_NAME.fullmatch(folder.name)
    assert match is not None, folder
    return int(match.group(1))


def _check_json(value: Any, where: str) -> None:
    """Raise ValueError with the path of a value that JSON cannot restore. Tuples are allowed; they become lists."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ValueError(f"{where} has the key {name!r}; use strings as keys")
            _check_json(item, f"{where}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise ValueError(
            f"{where} is a {type(value).__name__}, which JSON cannot hold; use numbers, strings, lists and mappings"
        )


# --- names


def named_step(root: Path, file: str) -> Path | None:
    name = _read_name(root, file)
    if not name:
        return None
    folder = root / name
    if not STEP_NAME.fullmatch(name) or not put_back(folder):
        raise ValueError(
            f"{root / file} names {name!r}, but {root} has no such step folder; write one of {step_names(root)} into "
            "it, or set resume=none and another run_dir to start a new run"
        )
    return folder


def _read_name(root: Path, file: str) -> str | None:
    try:
        return (root / file).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def step_names(root: Path) -> list[str]:
    # By number: sorted as text, step_100 would come before step_20, and `prune` would remove the wrong ones.
    folders = [path for path in root.glob("step_*") if STEP_NAME.fullmatch(path.name) and path.is_dir()]
    return [path.name for path in sorted(folders, key=step_of)]


def put_back(folder: Path) -> bool:
    """Return True if the step folder exists. First restore one whose replacement was interrupted."""
    old = folder.with_name(f".{folder.name}.old")
    if folder.is_dir() or not old.is_dir():
        return folder.is_dir()
    try:
        old.rename(folder)
    except OSError:
        # The writer is still alive and has renamed the new folder in the meantime: that one is used.
        if not folder.is_dir():
            raise
    return True


# --- the disk


def _remove(path: Path) -> bool:
    """Remove a step folder, or files of an unfinished write. If that fails, log a warning and return False."""
    hidden = path
    try:
        if not path.is_dir():
            path.unlink()
            return True
        if path.suffix not in (".partial", ".gone"):
            # Renamed first, because a reader could otherwise open a step that is half removed.
            hidden = path.with_name(f".{path.name.removeprefix('.').partition('.')[0]}.gone")
            if hidden.exists():
                shutil.rmtree(hidden)
            path.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        logger.warning("%s could not be removed and takes space: %s; remove it by hand", hidden, error)
        return False
    return True


def _sync_tree(folder: Path) -> None:
    def fail(error: OSError) -> NoReturn:
        raise error

    # Files before their folders: a folder that is on the disk then never names a file that is not.
    for place, _, files in os.walk(folder, topdown=False, onerror=fail):
        for file in files:
            _sync(Path(place, file))
        _sync(Path(place))


def _sync(path: Path) -> None:
    # The target of a link belongs to another checkpoint or to the user, and may be missing.
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support fsync of folders and return EINVAL. The files are synced already.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _bytes_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def disk_fault(error: Exception, folder: Path) -> str | None:
    """Return the reason and remedy of a disk error, or None if the error has another cause."""
    code, reason = None, str(error).partition("\n")[0]
    if isinstance(error, OSError):
        # Python's connection errors and timeouts are OSErrors too. They come from ranks and servers, not from the disk.
        if isinstance(error, ConnectionError) or (isinstance(error, TimeoutError) and error.errno is None):
            return None
        code, reason = error.errno, error.strerror or reason
        # A file elsewhere, such as a temporary one, is named: the message would else blame the disk of the checkpoints.
        if error.filename is not None and not Path(str(error.filename)).is_relative_to(folder):
            reason += f": {error.filename}"
    # Errors of safetensors and of ranks in other processes have no errno attribute. Their text contains the number.
    elif (number := system_error_number(reason)) is not None:
        code = number
        reason = os.strerror(code)
    elif "inline_container.cc" in reason or "PytorchStreamWriter failed" in reason:
        # torch.save reports the reason only if it cannot open its file. A later failure is in practice a full disk.
        if "strerror" not in reason:
            code = errno.ENOSPC
        reason = f"torch could not write its file ({reason})"
    else:
        return None
    if _ADVICE.get(code or 0) == "free space" and folder.is_dir():
        # The free space tells a full disk from a quota: under a quota the disk still has space.
        reason += f" ({shutil.disk_usage(folder).free / 1e6:.0f} MB free)"
    return f"{reason}; {_ADVICE.get(code or 0, 'check it')}, or set another checkpoint folder"
