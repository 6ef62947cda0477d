"""The lock of a run folder: one writer at a time, its release, and folders that may be opened."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.messages import says
from training.tracking import open_run_folder
from training.tracking.run_folder import is_written

PROJECT = Path(__file__).parents[3]
HOLD = """
import signal, subprocess, sys
from training.tracking import open_run_folder
open_run_folder(sys.argv[1])
child = subprocess.Popen(["sleep", "infinity"], close_fds=False)
print(child.pid, flush=True)
signal.pause()
"""


@contextmanager
def held(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start another process that locks the folder, and its child process."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=PROJECT,
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None
        yield holder, int(holder.stdout.readline())
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.communicate(timeout=300)


def test_a_run_folder_is_created_and_can_be_reopened_by_its_process(tmp_path: Path) -> None:
    folder = open_run_folder(tmp_path / "a" / "run")
    assert folder == tmp_path / "a" / "run"
    assert (folder / ".lock").read_text() == f"process {os.getpid()} on {os.uname().nodename}\n"
    assert open_run_folder(folder) == folder


def test_a_run_folder_locked_by_another_process_is_refused_until_that_process_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with held(folder) as (holder, child):
        facts = (f"run_dir={folder};", f"process {holder.pid} ", os.uname().nodename)
        with pytest.raises(ValueError, match=says(*facts)):
            open_run_folder(folder)
        assert is_written(folder)
        holder.kill()
        holder.wait(timeout=300)
        os.kill(child, 0)  # its child process still runs, and holds no lock
        assert not is_written(folder)
        assert open_run_folder(folder) == folder
        assert f"process {os.getpid()} " in (folder / ".lock").read_text()


def test_a_forked_child_does_not_inherit_the_lock(tmp_path: Path) -> None:
    folder = open_run_folder(tmp_path / "run")
    child = os.fork()
    if child == 0:
        try:
            open_run_folder(folder)
        except ValueError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_recreated_run_folder_is_locked_again(tmp_path: Path) -> None:
    folder = open_run_folder(tmp_path / "run")
    (folder / ".lock").unlink()
    folder.rmdir()
    assert open_run_folder(folder) == folder
    assert (folder / ".lock").is_file()


def test_a_run_folder_with_steps_is_opened_only_to_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert open_run_folder(tmp_path, resume="none") == tmp_path
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for resume in ("auto", "elsewhere/checkpoints/step_3"):
        assert open_run_folder(tmp_path, resume) == tmp_path
    with pytest.raises(ValueError, match=says(f"run_dir={tmp_path} ", "resume=auto")):
        open_run_folder(tmp_path, resume="none")


def test_a_refused_new_run_releases_the_lock(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=says(f"run_dir={tmp_path} ", "resume=auto")):
        open_run_folder(tmp_path, resume="none")
    with held(tmp_path) as (holder, _):
        assert f"process {holder.pid} " in (tmp_path / ".lock").read_text()


def test_a_run_folder_that_cannot_be_created_or_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=says(f"run_dir={tmp_path}/file/run ", "Not a directory")):
        open_run_folder(tmp_path / "file" / "run")
    # /proc/sys rejects new files for every user, including root.
    with pytest.raises(ValueError, match=r"run_dir=/proc/sys .*\(\w.*\)"):
        open_run_folder("/proc/sys")
