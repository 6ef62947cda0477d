"""Step folders: whole or absent, and `latest` names a whole one."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from components.checkpoint import export_step, latest_step, mark_best, step_of

PROJECT = Path(__file__).parents[2]


def writer(text: str) -> Callable[[Path], object]:
    return lambda path: (path / "weights").write_text(text)


def test_an_exported_step_is_found_as_the_latest(tmp_path: Path) -> None:
    assert latest_step(tmp_path) is None
    assert export_step(tmp_path, 5, writer("five")) == tmp_path / "checkpoints" / "step_5" / "hf"
    assert export_step(tmp_path, 10, writer("ten")) == tmp_path / "checkpoints" / "step_10" / "hf"
    latest = latest_step(tmp_path)
    assert latest is not None
    assert step_of(latest) == 10
    assert (latest / "hf" / "weights").read_text() == "ten"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_10\n"


def test_a_step_done_again_replaces_the_folder_whole(tmp_path: Path) -> None:
    folder = export_step(tmp_path, 5, writer("before"))
    (folder / "stale").write_text("")
    assert export_step(tmp_path, 5, writer("after")) == folder
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"weights": "after"}
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_5"]


def test_a_failed_write_leaves_the_older_step_the_latest(tmp_path: Path) -> None:
    export_step(tmp_path, 5, writer("five"))

    def fail(path: Path) -> None:
        (path / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        export_step(tmp_path, 6, fail)
    with pytest.raises(ValueError, match="nothing was written for step 7"):
        export_step(tmp_path, 7, lambda path: None)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_5"]
    assert latest_step(tmp_path) == tmp_path / "checkpoints" / "step_5"


def test_a_process_killed_while_writing_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    export_step(tmp_path, 5, writer("five"))
    code = (
        "import os, signal, sys\nfrom components.checkpoint import export_step\n"
        "def write(path):\n    (path / 'half').write_text('')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "export_step(sys.argv[1], 6, write)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, cwd=PROJECT)
    assert killed.returncode == -9
    assert latest_step(tmp_path) == tmp_path / "checkpoints" / "step_5"
    assert not (tmp_path / "checkpoints" / "step_6").exists()
    # What the dead process left is in nobody's way.
    folder = export_step(tmp_path, 6, writer("six"))
    assert [path.name for path in folder.iterdir()] == ["weights"]


def test_a_latest_that_names_nothing_lists_the_steps_there_are(tmp_path: Path) -> None:
    for step in (9, 10):
        export_step(tmp_path, step, writer(""))
    (tmp_path / "checkpoints" / "latest").write_text("step_11")
    with pytest.raises(ValueError, match=r"names 'step_11', .* write one of \['step_9', 'step_10'\] into it"):
        latest_step(tmp_path)


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step=-1 is negative"):
        export_step(tmp_path, -1, writer(""))


def steps_of(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.name not in {"latest", "best"})


def best(run_dir: Path) -> str:
    return (run_dir / "checkpoints" / "best").read_text()


def test_the_best_step_takes_the_place_of_the_one_before_it(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        export_step(tmp_path, step, writer(str(step)))
    mark_best(tmp_path, 1)
    assert (best(tmp_path), steps_of(tmp_path)) == ("step_1\n", ["step_1", "step_2", "step_3"])
    mark_best(tmp_path, 1)
    assert steps_of(tmp_path) == ["step_1", "step_2", "step_3"]
    mark_best(tmp_path, 3)
    assert (best(tmp_path), steps_of(tmp_path)) == ("step_3\n", ["step_2", "step_3"])
    # Step 3 is no longer the best, but the latest: a run resumes from it.
    mark_best(tmp_path, 2)
    assert (best(tmp_path), steps_of(tmp_path)) == ("step_2\n", ["step_2", "step_3"])
    assert latest_step(tmp_path) == tmp_path / "checkpoints" / "step_3"


def test_a_step_that_was_not_exported_is_not_the_best(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no step_4 to mark as the best, only \[\]; export the step"):
        mark_best(tmp_path, 4)
    export_step(tmp_path, 5, writer("five"))
    mark_best(tmp_path, 5)
    with pytest.raises(ValueError, match=r"has no step_4 to mark as the best, only \['step_5'\]"):
        mark_best(tmp_path, 4)
    assert (best(tmp_path), steps_of(tmp_path)) == ("step_5\n", ["step_5"])


@pytest.mark.parametrize("before", ["step_77", "..", "", "hf"])
def test_a_best_that_names_no_step_here_is_replaced_and_nothing_removed(tmp_path: Path, before: str) -> None:
    export_step(tmp_path, 5, writer("five"))
    (tmp_path / "checkpoints" / "best").write_text(before)
    mark_best(tmp_path, 5)
    assert (best(tmp_path), steps_of(tmp_path)) == ("step_5\n", ["step_5"])


def test_a_process_killed_while_the_old_best_goes_leaves_the_new_one_named(tmp_path: Path) -> None:
    for step in (1, 2):
        export_step(tmp_path, step, writer(str(step)))
    mark_best(tmp_path, 1)
    # It dies when the first file is about to go: what is left does not lie under a step's name.
    code = (
        "import os, shutil, signal, sys\nfrom components import checkpoint\n"
        "def die(event, args):\n"
        "    if event == 'shutil.rmtree' and os.path.isdir(args[0]):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.addaudithook(die)\ncheckpoint.mark_best(sys.argv[1], 2)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, cwd=PROJECT)
    assert killed.returncode == -9
    assert (best(tmp_path), steps_of(tmp_path)) == ("step_2\n", [".step_1.old", "step_2"])
    # What the dead process left is in nobody's way.
    export_step(tmp_path, 3, writer("3"))
    export_step(tmp_path, 1, writer("1"))
    mark_best(tmp_path, 1)
    mark_best(tmp_path, 3)
    assert (best(tmp_path), steps_of(tmp_path)) == ("step_3\n", [".step_1.old", "step_1", "step_3"])
