"""Selection of the checkpoint to resume from, damaged checkpoints, and options changed since then."""

import math
import re
import shutil
from pathlib import Path

import pytest

from plugins.resume.checkpoints import changed_options, check_resume, find_checkpoint, read_state
from tests.messages import says
from tests.training.run.checkpoint_steps import save
from training.run.checkpoint import Checkpoints


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (None, ["No such file or directory"]),
        ("", ["JSON", "Expecting value"]),
        ('{"step": 3', ["JSON", "Expecting"]),
    ],
)
def test_an_unreadable_state_is_refused_with_its_path(tmp_path: Path, text: str | None, facts: list[object]) -> None:
    (tmp_path / "state").mkdir()
    if text is not None:
        (tmp_path / "state" / "trainer.json").write_text(text)
    with pytest.raises(ValueError, match=says(tmp_path / "state" / "trainer.json", *facts)):
        read_state(tmp_path)


# --- finding


def test_resume_none_and_a_run_without_checkpoints_start_from_the_beginning(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path), 1)
    assert find_checkpoint("none", tmp_path) is None
    assert find_checkpoint("auto", tmp_path / "missing") is None
    assert find_checkpoint("auto", tmp_path / "latest" / "below_a_file") is None
    Checkpoints(tmp_path / "empty")
    assert find_checkpoint("auto", tmp_path / "empty") is None


def test_resume_accepts_a_step_a_folder_of_steps_or_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2):
        save(Checkpoints(folder), step)
    (tmp_path / "good").symlink_to(folder / "step_1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(folder / "step_1" / "state")
    elsewhere = tmp_path / "other"
    assert find_checkpoint("auto", folder) == folder / "step_2"
    assert find_checkpoint("auto", "~/run/checkpoints") == folder / "step_2"
    assert find_checkpoint(f"{folder}/step_1/", elsewhere) == folder / "step_1"
    assert find_checkpoint(str(folder), elsewhere) == folder / "step_2"
    assert find_checkpoint(str(tmp_path / "run"), elsewhere) == folder / "step_2"
    assert find_checkpoint("~/run", elsewhere) == folder / "step_2"
    assert find_checkpoint("..", elsewhere) == folder / "step_1"
    assert find_checkpoint(str(tmp_path / "good"), elsewhere) == folder / "step_1"


def test_a_path_without_a_checkpoint_is_refused_with_the_searched_folders(tmp_path: Path) -> None:
    looked = (f"{tmp_path}/x,", f"{tmp_path}/x/latest", f"{tmp_path}/x/checkpoints/latest")
    with pytest.raises(ValueError, match=says(f"resume={tmp_path}/x:", *looked)):
        find_checkpoint(f"{tmp_path}/x", tmp_path)
    for resume in (f"{tmp_path}/step_3", "", " "):
        with pytest.raises(ValueError, match=f"resume={resume}:"):
            find_checkpoint(resume, tmp_path)
    with pytest.raises(ValueError, match="resume=~nobody_by_this_name/run"):
        find_checkpoint("~nobody_by_this_name/run", tmp_path)


def test_a_step_with_only_a_model_is_refused(tmp_path: Path) -> None:
    folder = save(Checkpoints(tmp_path), 3)
    shutil.rmtree(folder / "state")
    for resume in ("auto", str(folder), str(tmp_path)):
        with pytest.raises(ValueError, match=says(f"resume={resume}:", folder, "state/trainer.json")):
            find_checkpoint(resume, tmp_path)


def test_a_restarted_run_resumes_only_from_its_own_checkpoints(tmp_path: Path) -> None:
    folder, other = tmp_path / "own", tmp_path / "other"
    save(Checkpoints(other), 3)
    Checkpoints(folder).save(9, {"run_id": "before"}, lambda _: None)
    assert find_checkpoint(str(other), folder, "now") == other / "step_3"
    assert find_checkpoint("auto", folder, "now") == folder / "step_9"
    Checkpoints(folder).save(4, {"run_id": "now"}, lambda _: None)
    for resume in (str(other), "auto", "none"):
        assert find_checkpoint(resume, folder, "now") == folder / "step_4"


# --- damage


@pytest.mark.parametrize("file", ["state/actor/rank_0.bin", "hf/model.bin", "state/trainer.json"])
@pytest.mark.parametrize("harm", ["removed", "emptied", "cut", "changed"])
def test_a_damaged_latest_checkpoint_is_named_and_the_previous_complete_one_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, harm: str
) -> None:
    box = Checkpoints(tmp_path / "run" / "checkpoints")
    for step in (2, 9, 10, 11):
        save(box, step, "abc")
    damage_file(box.folder / "step_10" / "hf" / "model.bin", "cut")
    damage_file(box.folder / "step_11" / file, harm)
    for resume in ("auto", str(box.folder), str(tmp_path / "run")):
        caplog.clear()
        assert find_checkpoint(resume, box.folder) == box.folder / "step_9"
        assert re.search(says("step_11", file, "step_9"), caplog.text)
    with pytest.raises(ValueError, match=says("step_11", file, f"resume={box.folder}/step_9")):
        find_checkpoint(str(box.folder / "step_11"), tmp_path)
    # Saved again, it is complete.
    save(box, 11, "abc")
    assert find_checkpoint("auto", box.folder) == box.folder / "step_11"


def damage_file(file: Path, harm: str) -> None:
    data = file.read_bytes()
    if harm == "removed":
        file.unlink()
        return
    file.write_bytes({"emptied": b"", "cut": data[:-1], "changed": bytes([data[0] ^ 1]) + data[1:]}[harm])


def test_a_damaged_latest_checkpoint_without_a_complete_predecessor_is_refused(tmp_path: Path) -> None:
    folder = save(Checkpoints(tmp_path), 3)
    damage_file(folder / "hf" / "model.bin", "emptied")
    for resume in ("auto", str(tmp_path)):
        with pytest.raises(ValueError, match=says("step_3", "hf/model.bin", "resume=none")):
            find_checkpoint(resume, tmp_path)


def test_a_checkpoint_with_missing_or_damaged_digests_is_not_used(tmp_path: Path) -> None:
    for step in (1, 2):
        save(Checkpoints(tmp_path), step)
    digests = tmp_path / "step_2" / "state" / "digests.json"
    for text in ("", "[]", "{", "[" * 100_000, "\0"):
        digests.write_text(text)
        assert find_checkpoint("auto", tmp_path) == tmp_path / "step_1"
    digests.unlink()
    assert find_checkpoint("auto", tmp_path) == tmp_path / "step_1"
    # The state may be missing too.
    for text in ("", "[]", "{", "[" * 100_000):
        (tmp_path / "step_2" / "state" / "trainer.json").write_text(text)
        assert find_checkpoint("auto", tmp_path) == tmp_path / "step_1"


@pytest.mark.parametrize("harm", ["removed", "emptied"])
def test_without_a_latest_file_the_newest_complete_step_is_used_with_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    for step in (1, 2, 3):
        save(Checkpoints(tmp_path), step)
    damage_file(tmp_path / "step_3" / "hf" / "model.bin", "cut")
    damage_file(tmp_path / "latest", harm)
    assert find_checkpoint("auto", tmp_path) == tmp_path / "step_2"
    assert re.search(says(f"{tmp_path}/latest", "step_2"), caplog.text)
    # No new run starts over damaged checkpoints.
    with pytest.raises(ValueError, match=says(tmp_path, "step_2", "resume=auto")):
        check_resume("none", tmp_path)


# --- options


def test_changed_options_are_listed_in_the_current_order() -> None:
    before = {
        "seed": 1,
        "gone": None,
        "lr": 1e-6,
        "betas": [0.9, 0.95],
        "limit": math.nan,
        "wandb": {"org": "a", "n": 1},
    }
    now = {"lr": 2e-6, "betas": [0.9, 0.95], "limit": math.nan, "wandb": {"org": "b", "n": 1}, "new": 3, "seed": 1}
    lines = ["lr: 1e-06 -> 2e-06", "wandb.org: 'a' -> 'b'", "new: (not set) -> 3", "gone: None -> (not set)"]
    assert changed_options(before, now) == lines
    assert changed_options(before, now | {"run_dir": "b", "checkpoint": {"path": "c"}}) == lines
    assert changed_options(before, before) == []
    assert changed_options({"a": {}}, {"a": {"b": None}}) == ["a.b: (not set) -> None", "a: {} -> (not set)"]
