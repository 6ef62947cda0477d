"""A checkpoint is complete or absent, for a death of the process at any moment and for any error of the disk."""

import json
import logging
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from plugins.resume.checkpoints import find_checkpoint, read_state
from tests.messages import says
from tests.training.run.checkpoint_steps import assert_whole, names, save
from training.run.checkpoint import CheckpointError, Checkpoints

PROJECT = Path(__file__).parents[3]


def run_python(code: str, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=540, cwd=PROJECT)


# --- killed

KILL_AT_EVERY_OPERATION = """
    import itertools, os, shutil, signal, sys
    from pathlib import Path
    from training.run.checkpoint import Checkpoints
    from tests.training.run.checkpoint_steps import save

    root, what = Path(sys.argv[1]), sys.argv[2]
    before = root / "before"
    box = Checkpoints(before, keep=9)
    for step in {"next": [1, 2], "again": [1], "best": [1, 2, 3]}[what]:
        save(box, step)
    if what == "best":
        box.mark_best(1)
    left = None
    ON_DISK = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.scandir", "os.listdir"}

    def die(event, args):
        global left
        if left is not None and event in ON_DISK:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(die)
    for count in itertools.count():
        folder = root / f"killed_{count}"
        shutil.copytree(before, folder)
        child = os.fork()
        if child == 0:
            box = Checkpoints(folder, keep=1)
            left = count
            if what == "best":
                box.mark_best(3)
            else:
                save(box, {"next": 3, "again": 1}[what], "b")
            os._exit(0)
        if os.waitpid(child, 0)[1] != signal.SIGKILL:
            break
"""


@pytest.mark.parametrize(
    ("what", "found_before", "found_after", "traces"),
    [
        ("next", "step_2", "step_3", {".step_3.partial", ".latest.partial", ".step_1.gone", ".step_2.gone"}),
        ("again", "step_1", "step_1", {".step_1.partial", ".latest.partial", ".step_1.old", ".step_1.gone"}),
        ("best", "step_3", "step_3", {".best.partial", ".step_1.gone", ".step_2.gone"}),
    ],
)
def test_after_a_kill_at_any_file_operation_a_complete_step_exists(
    tmp_path: Path, what: str, found_before: str, found_after: str, traces: set[str]
) -> None:
    result = run_python(KILL_AT_EVERY_OPERATION, tmp_path, what)
    assert result.returncode == 0, result.stderr
    shutil.rmtree(tmp_path / "before")
    seen: set[str] = set()
    found_in: list[str] = []
    for count in range(len(names(tmp_path))):
        folder = tmp_path / f"killed_{count}"
        seen |= {name for name in names(folder) if name.startswith(".")}
        # The next writer gets the same result, with or without a reader before it.
        written_first = Checkpoints(shutil.copytree(folder, tmp_path / "written_first"), keep=1).latest()
        assert written_first is not None
        assert_whole(written_first)
        shutil.rmtree(tmp_path / "written_first")
        checkpoint = find_checkpoint("auto", folder)
        assert checkpoint is not None
        assert_whole(checkpoint)
        for step in folder.glob("step_*"):
            assert_whole(step)
        found_in.append(f"{checkpoint.name} {read_state(checkpoint)['generation']}")
        box = Checkpoints(folder, keep=1)
        assert not [name for name in names(folder) if name.startswith(".")]
        assert box.latest() == checkpoint
        assert written_first.name == checkpoint.name
        if what == "best":
            assert_whole(folder / (folder / "best").read_text().strip())
        assert_whole(save(box, 4))
    assert seen == traces
    # Readers first see the old state and then, from one moment on, the new one.
    after = f"{found_after} {'a' if what == 'best' else 'b'}"
    first_after = found_in.index(after)
    assert found_in == [f"{found_before} a"] * first_after + [after] * (len(found_in) - first_after)
    assert what == "best" or 10 < first_after < len(found_in) - 2


def test_a_kill_during_writing_does_not_change_earlier_steps(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path), 5)
    code = """
        import signal, sys
        from pathlib import Path
        from training.run.checkpoint import Checkpoints

        def write(folder):
            (folder / "hf").mkdir()
            (folder / "hf" / "half").write_text("")
            print("half of it is there", flush=True)
            signal.pause()

        Checkpoints(sys.argv[1]).save(int(sys.argv[2]), {}, write)
    """
    for step in (5, 6):
        command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path), str(step)]
        with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            process.kill()
        assert process.returncode == -signal.SIGKILL
        assert names(tmp_path) == [f".step_{step}.partial", "latest", "step_5"]
        assert find_checkpoint("auto", tmp_path) == tmp_path / "step_5"
        assert_whole(tmp_path / "step_5")
    Checkpoints(tmp_path)
    assert names(tmp_path) == ["latest", "step_5"]


# --- refused


def test_other_errors_than_those_of_the_disk_are_passed_on(tmp_path: Path) -> None:
    box = Checkpoints(tmp_path)
    save(box, 5)
    for error in (
        RuntimeError("CUDA error"),
        TimeoutError("rank 1 did not answer"),
        ConnectionResetError(104, "reset"),
    ):

        def fail(folder: Path, error: Exception = error) -> None:
            (folder / "half").write_text("")
            raise error

        with pytest.raises(type(error)) as caught:
            box.save(6, {}, fail)
        assert caught.value is error
    assert names(tmp_path) == ["latest", "step_5"]
    assert box.latest() == tmp_path / "step_5"


def test_an_unusable_file_outside_of_the_folder_is_named(tmp_path: Path) -> None:
    box = Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=says("step 6", box.folder, f"Is a directory: {tmp_path};")):
        box.save(6, {}, lambda folder: tmp_path.write_text("a second place for the model"))
    assert names(box.folder) == []


def in_a_small_disk(code: str, folder: Path, *arguments: object) -> dict[str, Any]:
    """Run code in a process with a 2 MB disk at `folder`. If no disk can be mounted, file sizes are limited instead.

    The code finds in sys.argv: the folder, "disk" or "limit", and the arguments; it prints one line of JSON.
    """
    folder.mkdir()
    mount = "mount -t tmpfs -o size=2m none " + str(folder)
    enter = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")
    allowed = (
        shutil.which("unshare") is not None and subprocess.run([*enter, "true"], capture_output=True).returncode == 0
    )
    if allowed:
        result = run_python(code, folder, "disk", *arguments, prefix=enter)
    else:
        limit = ("sh", "-c", 'ulimit -f 1024; exec "$@"', "sh")
        result = run_python(code, folder, "limit", *arguments, prefix=limit)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_after_a_full_disk_at_any_point_the_last_checkpoint_is_complete_and_named(tmp_path: Path) -> None:
    # For every number of free pages, so that each file of a save is once the one that does not fit.
    code = """
        import json, os, sys
        from pathlib import Path
        from plugins.resume.checkpoints import find_checkpoint
        from training.run.checkpoint import CheckpointError, Checkpoints
        from tests.training.run.checkpoint_steps import assert_whole, names, save

        folder, full = Path(sys.argv[1]), sys.argv[2] == "disk"
        box = Checkpoints(folder / "run", keep=9)
        save(box, 1)
        said, saved = [], []
        for pages in range(12) if full else [0]:
            filler = folder / "filler"
            if full:
                free = os.statvfs(folder).f_bavail * 4096
                filler.write_bytes(b"f" * (free - pages * 4096))
            step = pages + 2
            def write(aside):
                (aside / "hf").mkdir()
                (aside / "hf" / "model.bin").write_bytes(b"w" * (4096 * 4 if full else 2_000_000))
            try:
                box.save(step, {"step": step}, write)
                saved.append(pages)
            except CheckpointError as error:
                said.append(str(error))
                assert find_checkpoint("auto", folder / "run") == folder / "run" / "step_1"
                assert names(folder / "run") == ["latest", "step_1"], names(folder / "run")
                assert_whole(folder / "run" / "step_1")
            filler.unlink(missing_ok=True)
            if saved:
                break
        print(json.dumps({"said": said, "saved": saved, "full": full}))
    """
    result = in_a_small_disk(code, tmp_path / "disk")
    facts = ["step 2", f"{tmp_path}/disk/run", "step_1"]
    if result["full"]:
        # Four pages for the model, one for trainer.json, one for digests.json, one for the name file.
        assert result["saved"] == [7]
        assert len(result["said"]) == 7
        facts += ["No space left on device", "0 MB"]
    else:
        facts += ["File too large", "ulimit -f"]
    assert re.search(says(*facts), result["said"][0])


def test_a_full_disk_in_torch_or_safetensors_is_reported_as_a_full_disk(tmp_path: Path) -> None:
    code = """
        import json, os, sys
        from pathlib import Path
        import torch
        from safetensors.torch import save_file
        from training.run.checkpoint import CheckpointError, Checkpoints
        from tests.training.run.checkpoint_steps import names, save

        folder, full = Path(sys.argv[1]), sys.argv[2] == "disk"
        box = Checkpoints(folder / "run")
        save(box, 1)
        weights = {"w": torch.zeros(1_000_000)}
        said = []
        for write in (
            lambda aside: torch.save(weights, aside / "state" / "rank_0.pt"),
            lambda aside: save_file(weights, aside / "model.safetensors"),
        ):
            try:
                box.save(2, {}, write)
            except CheckpointError as error:
                said.append(str(error))
        if full:
            (folder / "filler").write_bytes(b"f" * (os.statvfs(folder).f_bavail * 4096))
            try:
                box.mark_best(1)
            except CheckpointError as error:
                said.append(str(error))
        assert names(folder / "run") == ["latest", "step_1"], names(folder / "run")
        print(json.dumps({"said": said, "full": full}))
    """
    result = in_a_small_disk(code, tmp_path / "disk")
    run = tmp_path / "disk" / "run"
    torch_said, safetensors_said, *rest = result["said"]
    free = " MB free" if result["full"] else "torch"
    assert re.search(says("step 2", f"{run}:", "torch", free, "step_1"), torch_said)
    reason = "No space left on device" if result["full"] else "File too large"
    assert re.search(says("step 2", f"{run}:", reason, "step_1"), safetensors_said)
    assert len(rest) == (1 if result["full"] else 0)
    for marked in rest:
        assert re.search(says("step 1 ", f"{run}:", "No space left on device", "0 MB", "step_1"), marked)


def test_a_file_size_limit_is_reported_and_without_it_the_run_continues(tmp_path: Path) -> None:
    code = """
        import resource, sys
        from pathlib import Path
        from training.run.checkpoint import CheckpointError, Checkpoints
        from tests.training.run.checkpoint_steps import names, save

        box = Checkpoints(sys.argv[1])
        save(box, 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        write = lambda aside: (aside / "model").write_bytes(b"w" * 100_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        try:
            box.save(2, {}, write)
        except CheckpointError as error:
            print(error)
        assert names(box.folder) == ["latest", "step_1"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        print(box.save(2, {}, write).name)
    """
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    said, saved = result.stdout.splitlines()
    assert re.search(says("step 2", f"{tmp_path}:", "File too large", "step_1", "ulimit -f"), said)
    assert saved == "step_2"


def test_an_unwritable_folder_is_reported_and_not_changed(tmp_path: Path) -> None:
    # Root may write anywhere, so the process runs as the user nobody.
    code = """
        import json, logging, os, shutil, sys, tempfile
        from pathlib import Path
        from plugins.resume.checkpoints import find_checkpoint
        from training.run.checkpoint import CheckpointError, Checkpoints
        from tests.training.run.checkpoint_steps import assert_whole, names, save

        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        logging.basicConfig(format="%(message)s", stream=sys.stderr)
        place = Path(tempfile.mkdtemp())
        box = Checkpoints(place / "run", keep=1)
        said = [str(place)]
        save(box, 1)
        (place / "run").chmod(0o500)
        for attempt in (lambda: save(box, 2), lambda: box.mark_best(1), lambda: Checkpoints(place / "run" / "new"),
                        lambda: Checkpoints(place / "run")):
            try:
                attempt()
            except (CheckpointError, ValueError) as error:
                said.append(f"{type(error).__name__}: {error}")
            assert find_checkpoint("auto", place / "run") == place / "run" / "step_1"
            assert names(place / "run") == ["latest", "step_1"]
            assert_whole(place / "run" / "step_1")
        (place / "run").chmod(0o700)
        # A step that cannot be removed stops no save, not even the one after it.
        (place / "run" / "step_1" / "hf").chmod(0o500)
        save(box, 2)
        save(box, 3)
        said.append(names(place / "run"))
        (place / "run" / ".step_1.gone" / "hf").chmod(0o700)
        save(box, 4)
        said.append(names(place / "run"))
        shutil.rmtree(place)
        print(json.dumps(said))
    """
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    place, *said = json.loads(result.stdout)
    folder = f"{place}/run"
    for message, *facts in zip(
        said[:4],
        ("CheckpointError", "CheckpointError", "ValueError", "ValueError"),
        ("step 2", "step 1 ", "run_dir", "run_dir"),
        (f"{folder}:", f"{folder}:", f"{folder}/new:", f"{folder}:"),
        strict=True,
    ):
        assert re.search(says(*facts, "Permission denied"), message)
    assert all("step_1" in message for message in said[:2])
    assert said[4:] == [[".step_1.gone", "latest", "step_3"], ["latest", "step_4"]]
    warnings = result.stderr.splitlines()
    assert len(warnings) == 2
    assert all(f"{folder}/.step_1.gone" in line for line in warnings)


def test_a_file_at_the_path_of_the_folder_is_refused_with_the_option_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "run", "Not a directory")):
        with pytest.raises(ValueError, match=says(f"{place}:", reason, "run_dir")):
            Checkpoints(place)


def test_a_removed_folder_is_reported_without_a_last_checkpoint(tmp_path: Path) -> None:
    box = Checkpoints(tmp_path / "run")
    save(box, 1)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match=says(f"{tmp_path}/run:", "Not a directory")):
        save(box, 2)


@pytest.mark.parametrize("step", [1, 2])
def test_a_failed_write_of_latest_does_not_change_the_steps(tmp_path: Path, step: int) -> None:
    box = Checkpoints(tmp_path)
    save(box, 1, "before")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match=says(f"{tmp_path}:", "Is a directory")):
        save(box, step, "after")
    assert names(tmp_path) == ["latest", "step_1"]
    assert_whole(tmp_path / "step_1")
    assert read_state(tmp_path / "step_1")["generation"] == "before"


def test_foreign_files_are_left_untouched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("step_1.backup", ".step_2.mine", "notes", "step_x"):
        (tmp_path / name).mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        box = Checkpoints(tmp_path, keep=1)
        save(box, 1)
        save(box, 2)
    assert names(tmp_path) == [".step_2.mine", "latest", "notes", "step_1.backup", "step_2", "step_x"]
    assert caplog.records == []
