"""Whole checkpoints of a run: written aside, renamed when whole, and named by `latest`. Nothing here needs torch.

<folder>/step_12/state/trainer.json   the trainer's own state, plain JSON
<folder>/step_12/state/<role>/...     what the ranks of a role resume from
<folder>/step_12/state/digests.json  of all files of the step, to find damage
<folder>/step_12/hf/                  a model that from_pretrained loads
<folder>/latest                       the text "step_12"
<folder>/best                         the text "step_9", where a run marks its best step

Hidden names are of a write that is continuing, or whose process was killed; the next writer removes them:

.step_12.partial   being written
.step_12.gone      being removed
.step_12.old       whole, from before a resume, while the new step_12 takes its place; without a step_12 it is put back
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
from training.run.checkpoint_digests import STATE_FILE, Digests, damage
from training.tracking.serialization import flat

logger = logging.getLogger(__name__)

LATEST = "latest"
BEST = "best"

_STEP = re.compile(r"step_(\d+)")
_LEFTOVER = re.compile(r"\.(step_\d+|latest|best|probe)\.(partial|gone|old)")
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable"),
    errno.EFBIG: "raise the limit for a file (ulimit -f)",
}
"""What to do about errors of the disk."""


class CheckpointError(OSError):
    """A checkpoint could not be written; what was there before is whole. The message is one line for the user."""


class Checkpoints:
    """The step folders of one run: `<folder>/step_12/{state,hf}`, `latest`, `best`. One process writes.

    Whenever this process dies, a reader sees a step whole or not at all, and `latest` and `best` name whole ones.

    Args:
        folder: where the steps lie; made when it is not there.
        keep: how many of the newest steps stay, at least 1. The best stays beside them.
        max_bytes: what all steps together may take; the latest and the best stay whatever they take.
        least_bytes: size of a step, at least; 0: not known.

    Raises:
        ValueError: the folder cannot be made or written into.
    """

    def __init__(self, folder: str | Path, keep: int = 3, max_bytes: float = math.inf, least_bytes: int = 0) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.keep = keep
        self.max_bytes = max_bytes
        self.least_bytes = least_bytes
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            # Asking for permissions says nothing of a read-only or a full disk; making something does.
            probe = self.folder / ".probe.partial"
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            raise ValueError(
                f"checkpoints cannot be written to {self.folder}: {error.strerror or error}; set another checkpoint "
                "folder, or run_dir"
            ) from error

    def try_write(self, write: Callable[[Path], object]) -> None:
        """Write something into the folder of the steps as a checkpoint would, and remove it.

        Args:
            write: fills the folder it is given, whose names are as long as those of a step.

        Raises:
            ValueError: the disk does not take it. Other errors of `write` pass through.
        """
        probe = self.folder / ".probe.partial"
        try:
            probe.mkdir()
            write(probe)
        except Exception as error:
            fault = _disk_fault(error, self.folder)
            if fault is None:
                raise
            raise ValueError(f"a trial export could not be written to {self.folder}: {fault}") from error
        finally:
            shutil.rmtree(probe, ignore_errors=True)

    def save(self, step: int, state: Mapping[str, Any], write: Callable[[Path], object]) -> Path:
        """Write one step whole, make it the latest, and remove what is over the limits.

        A folder of the same step, from before a resume, is replaced. When the write fails, what it left is removed,
        and `latest` and all whole steps are as before.

        Args:
            step: the step that was finished last.
            state: numbers, strings, lists and mappings for state/trainer.json; see `read_state`.
            write: fills the folder it is given, which has an empty `state`: `state/<role>/...`, `hf/...`. It may call
                the ranks of a role.

        Returns:
            The step's folder.

        Raises:
            ValueError: the state holds what JSON cannot.
            CheckpointError: the disk is full, read-only or not ours. Other errors of `write` pass through.
        """
        _check_json(state, "state")
        # With NaN and Infinity where there are any, which Python reads again.
        text = json.dumps(dict(state)) + "\n"
        aside = self.folder / f".step_{step}.partial"
        try:
            self._sweep()
            self._check_space()
            (aside / "state").mkdir(parents=True)
            write(aside)
            (aside / STATE_FILE).write_text(text, encoding="utf-8")
            digests = Digests(aside)
            _sync_tree(aside)
            _sync(digests.write())
            _sync(aside / "state")
            folder = self._commit(aside, f"step_{step}")
        except Exception as error:
            fault = _disk_fault(error, self.folder)
            if fault is None:
                raise
            raise self._error(f"checkpoint of step {step} could not be written to {self.folder}", fault) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self.prune()
        return folder

    def mark_best(self, step: int) -> None:
        """Let `best` name this step; the one that was best before stays only within the limits.

        Raises:
            ValueError: the step was not saved.
            CheckpointError: the name could not be written; the former best still is it.
        """
        name = f"step_{step}"
        if not (self.folder / name).is_dir():
            raise ValueError(
                f"{self.folder} has no {name} to mark as the best, only {_names(self.folder)}; save the step before it "
                "is marked"
            )
        try:
            self._write_aside(BEST, name).replace(self.folder / BEST)
            _sync(self.folder)
        except OSError as error:
            fault = _disk_fault(error, self.folder) or str(error)
            raise self._error(f"step {step} could not be marked as the best in {self.folder}", fault) from error
        self.prune()

    def latest(self) -> Path | None:
        """Find the step folder that `latest` names; None when nothing was saved yet.

        Raises:
            ValueError: it names none.
        """
        return _named(self.folder, LATEST)

    def prune(self) -> None:
        """Remove the oldest steps beyond the limits, never the latest nor the best.

        Steps above the latest are from before a resume from an older step: nothing leads on from them, so they
        count as the oldest. What cannot be removed is said in a warning; the run continues.
        """
        latest = _read_name(self.folder, LATEST)
        safe = {latest, _read_name(self.folder, BEST)}
        names = _names(self.folder)
        if latest in names:
            after = names.index(latest) + 1
            names = names[after:] + names[:after]
        over = set(names[: -self.keep])
        size = {name: _bytes_of(self.folder / name) for name in names} if self.max_bytes < math.inf else {}
        for name in names:
            is_over = name in over or sum(size.values()) > self.max_bytes
            if is_over and name not in safe and _remove(self.folder / name):
                size.pop(name, None)

    def _check_space(self) -> None:
        """Raise the OSError of a full disk where a step cannot fit, before minutes are spent on writing most of it."""
        latest = self.folder / (_read_name(self.folder, LATEST) or LATEST)
        # The latest may hold batches that waited to be trained on, which the next one has not.
        needed = self.least_bytes or (_bytes_of(latest) // 2 if latest.is_dir() else 0)
        if shutil.disk_usage(self.folder).free < needed:
            advice = "it takes {:.1f} MB at least; lower checkpoint.keep or checkpoint.max_gb"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {advice.format(needed / 1e6)}")

    def _commit(self, aside: Path, name: str) -> Path:
        """Give the whole folder its name and make it the latest; undone when one half fails."""
        target, old = self.folder / name, self.folder / f".{name}.old"
        # All that takes room is on the disk before the first name changes.
        pointer = self._write_aside(LATEST, name)
        try:
            # A folder cannot be renamed over a full one. Killed between these two, the old one is put back later.
            if target.exists():
                target.rename(old)
            aside.rename(target)
            _sync(self.folder)
            pointer.replace(self.folder / LATEST)
        except OSError:
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
        """Clear away what a write left that did not come to its end."""
        for path in sorted(self.folder.iterdir()):
            if not _LEFTOVER.fullmatch(path.name):
                continue
            step = path.with_name(path.stem.removeprefix("."))
            if path.suffix == ".old" and not step.is_dir():
                path.rename(step)
            else:
                _remove(path)

    def _error(self, what: str, fault: str) -> CheckpointError:
        name = _read_name(self.folder, LATEST)
        last = f"the last whole one is {name}" if name in _names(self.folder) else "there is no whole one yet"
        return CheckpointError(f"{what}: {fault}; {last}")


def find_checkpoint(resume: str, folder: str | Path, run_id: str | None = None) -> Path | None:
    """Find the step folder to resume from.

    Args:
        resume: "none": None. "auto": the latest in `folder`, or None when there is none. Else a path: a step folder,
            a folder with `latest`, or a run's folder with `checkpoints/latest`. Where the latest is damaged, the newest
            whole one before it is taken, with a warning; a step folder that is named is taken whole or not at all.
        folder: the folder of the run's checkpoints; it need not be there.
        run_id: who asks. When the latest in `folder` was saved with this `run_id` in its state, the run was started
            again: it resumes from there, whatever `resume` says. What another run left there does not count.

    Raises:
        ValueError: nothing is there, or nothing to resume from.
    """
    if run_id is not None:
        own = find_checkpoint("auto", folder)
        if own is not None and read_state(own).get("run_id") == run_id:
            return own
    if resume == "none":
        return None
    try:
        found = _newest_whole(Path(folder).expanduser().absolute()) if resume == "auto" else _find(resume)
    except (OSError, RuntimeError) as error:
        # The second is pathlib's, for a home that is not known and for links in a circle.
        raise ValueError(f"resume={resume} cannot be read: {error}; set resume to a step folder, or to none") from error
    if found is not None and not (found / STATE_FILE).is_file():
        raise ValueError(
            f"resume={resume}: {found} holds a model but no state to resume from (no {STATE_FILE}); set resume to "
            "another checkpoint, or to none"
        )
    return found


def check_resume(resume: str, folder: str | Path) -> None:
    """See, before a run starts, that it can resume from where `resume` says, or begin anew in `folder`.

    Raises:
        ValueError: as `find_checkpoint`; or `resume` is "none" and `folder` holds checkpoints already.
    """
    found = find_checkpoint("auto" if resume == "none" else resume, folder)
    if resume == "none" and found is not None:
        raise ValueError(
            f"{folder} holds checkpoints already, up to {found.name}; set resume=auto to resume from there, or name "
            "another folder"
        )


def read_state(step_folder: Path) -> dict[str, Any]:
    """Read what `save` was given as `state`; lists where it had tuples, and the same bits in every float.

    Raises:
        ValueError: state/trainer.json is missing, or is no JSON.
    """
    file = step_folder / STATE_FILE
    advice = "resume from another checkpoint, or set resume to none"
    try:
        return dict(json.loads(file.read_bytes()))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}; {advice}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON object: {error}; {advice}") from error


def step_of(folder: Path) -> int:
    """Read the step's number off its folder."""
    match = _STEP.fullmatch(folder.name)
    assert match is not None, folder
    return int(match.group(1))


IGNORED_CHANGES = ("run_dir", "resume", "dry_run", "print_config", "checkpoint.path", "checkpoint.export_path")
"""Options that may differ from those of a checkpoint without being worth a word."""


def changed_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say which options differ, one line each: "train.learning_rate: 1e-06 -> 2e-06".

    In the order of `now`, then those that only `before` has; without IGNORED_CHANGES.

    Args:
        before: as `read_state` gives it.
        now: plain values, as `redact` makes them.
    """
    old, new = flat(before), flat(now)
    lines = []
    for name in dict.fromkeys([*new, *old]):
        left, right = (repr(own[name]) if name in own else "(not set)" for own in (old, new))
        if name not in IGNORED_CHANGES and left != right:
            lines.append(f"{name}: {left} -> {right}")
    return lines


def _check_json(value: Any, where: str) -> None:
    """ValueError, which names the place, for what would not come back as it is; of tuples come lists."""
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


def _find(resume: str) -> Path:
    given = Path(resume).expanduser()
    path = given.absolute() if _STEP.fullmatch(given.name) else given.resolve()
    found = path if resume.strip() and _STEP.fullmatch(path.name) and _put_back(path) else None
    if found is not None:
        _refuse_damage(resume, found)
    elif resume.strip():
        found = _newest_whole(path) or _newest_whole(path / "checkpoints")
    if found is None:
        raise ValueError(
            f"resume={resume}: there is no checkpoint; looked for a step folder at {path}, for {path / LATEST} and for "
            f"{path / 'checkpoints' / LATEST}; set resume to one of these, to auto or to none"
        )
    return found


def _newest_whole(root: Path) -> Path | None:
    """The step that `latest` names; where it is damaged the newest whole one before it, and where there is no `latest`
    the newest whole one, with a warning.
    """
    latest = _named(root, LATEST)
    if latest is None:
        whole = _whole_before(root)
        if whole is not None:
            logger.warning("%s is missing or empty; resuming from %s, the newest whole one", root / LATEST, whole.name)
        return whole
    fault = damage(latest)
    if fault is None:
        return latest
    whole = _whole_before(root, step_of(latest))
    if whole is None:
        raise ValueError(
            f"{latest} is damaged: {fault}; no whole checkpoint is before it; bring its files back, or set resume=none "
            "and another run_dir"
        )
    logger.warning("%s is damaged: %s; resuming from %s, the newest whole one before it", latest, fault, whole.name)
    return whole


def _refuse_damage(resume: str, folder: Path) -> None:
    fault = damage(folder)
    if fault is not None:
        whole = _whole_before(folder.parent, step_of(folder))
        advice = f"set resume={whole}, the newest whole one before it" if whole else "no whole one is before it"
        raise ValueError(f"resume={resume} is damaged: {fault}; {advice}")


def _whole_before(root: Path, step: float = math.inf) -> Path | None:
    """The newest step of the same run, before this one, that is whole and can be resumed from."""
    earlier = [root / name for name in _names(root) if step_of(root / name) < step]
    whole = (path for path in reversed(earlier) if (path / STATE_FILE).is_file() and damage(path) is None)
    return next(whole, None)


def _named(root: Path, file: str) -> Path | None:
    name = _read_name(root, file)
    if not name:
        return None
    folder = root / name
    if not _STEP.fullmatch(name) or not _put_back(folder):
        raise ValueError(
            f"{root / file} names {name!r}, which is no step folder here; write one of {_names(root)} into it, or "
            "set resume=none and another run_dir to start anew"
        )
    return folder


def _read_name(root: Path, file: str) -> str | None:
    try:
        return (root / file).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _names(root: Path) -> list[str]:
    found = [path for path in root.glob("step_*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return [path.name for path in sorted(found, key=step_of)]


def _put_back(folder: Path) -> bool:
    """Whether the step is there; one whose process was killed while it replaced it gets its name back first."""
    old = folder.with_name(f".{folder.name}.old")
    if folder.is_dir() or not old.is_dir():
        return folder.is_dir()
    try:
        old.rename(folder)
    except OSError:
        # The process lives, and has put the new one there in this moment.
        if not folder.is_dir():
            raise
    return True


# --- the disk


def _remove(path: Path) -> bool:
    """Remove a step's folder, or what a write left; False, with a warning, where the disk does not let us."""
    going = path
    try:
        if not path.is_dir():
            path.unlink()
            return True
        if path.suffix not in (".partial", ".gone"):
            # Under its own name it would be seen by halves while it goes.
            going = path.with_name(f".{path.name.removeprefix('.').partition('.')[0]}.gone")
            if going.exists():
                shutil.rmtree(going)
            path.rename(going)
        shutil.rmtree(going)
    except OSError as error:
        logger.warning("%s could not be removed and takes space: %s; remove it by hand", going, error)
        return False
    return True


def _sync_tree(folder: Path) -> None:
    def fail(error: OSError) -> NoReturn:
        raise error

    for place, _, files in os.walk(folder, topdown=False, onerror=fail):
        for file in files:
            _sync(Path(place, file))
        _sync(Path(place))


def _sync(path: Path) -> None:
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for folders, and say so with this.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _bytes_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _disk_fault(error: Exception, folder: Path) -> str | None:
    """Why the disk did not take it, and what to do; None when the error is not of the disk."""
    code, reason = None, str(error).partition("\n")[0]
    if isinstance(error, OSError):
        # Ranks and servers that do not answer are no fault of the disk, though Python counts both under OSError.
        if isinstance(error, ConnectionError) or (isinstance(error, TimeoutError) and error.errno is None):
            return None
        code, reason = error.errno, error.strerror or reason
        if error.filename is not None and not Path(str(error.filename)).is_relative_to(folder):
            reason += f": {error.filename}"
    elif (number := system_error_number(reason)) is not None:
        code = number
        reason = os.strerror(code)
    elif "inline_container.cc" in reason or "PytorchStreamWriter failed" in reason:
        # torch.save names the reason only when it opens its file. Later on it is, in practice, a full disk.
        code = None if "strerror" in reason else errno.ENOSPC
        reason = f"torch could not write its file ({reason})"
    else:
        return None
    if _ADVICE.get(code or 0) == "free space" and folder.is_dir():
        # On a full disk this shows what was left over, under a quota that the disk is not the limit.
        reason += f" ({shutil.disk_usage(folder).free / 1e6:.0f} MB free)"
    return f"{reason}; {_ADVICE.get(code or 0, 'check it')}, or set another checkpoint folder"
