"""Step folders: what is in them, which stay, how they are found, and what their state brings back."""

import math
import random
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.messages import says
from tests.training.run.checkpoint_steps import assert_whole, names, save
from training.run.checkpoint import (
    Checkpoints,
    changed_options,
    check_resume,
    find_checkpoint,
    read_state,
    step_of,
)


def test_a_saved_step_is_whole_and_the_latest(tmp_path: Path) -> None:
    box = Checkpoints(tmp_path / "run" / "checkpoints")
    assert box.latest() is None
    assert save(box, 5) == box.folder / "step_5"
    assert save(box, 10) == box.folder / "step_10"
    assert box.latest() == box.folder / "step_10"
    assert names(box.folder) == ["latest", "step_10", "step_5"]
    assert (box.folder / "latest").read_text() == "step_10\n"
    assert_whole(box.folder / "step_5")
    assert_whole(box.folder / "step_10")
    assert step_of(box.folder / "step_10") == 10


def test_write_is_given_an_empty_state_folder_that_no_reader_takes_for_a_step(tmp_path: Path) -> None:
    seen: list[Path] = []

    def write(folder: Path) -> None:
        seen.append(folder)
        assert [path.relative_to(folder) for path in folder.rglob("*")] == [Path("state")]
        assert find_checkpoint("auto", folder.parent) is None

    Checkpoints(tmp_path).save(1, {}, write)
    assert [path.name for path in seen] == [".step_1.partial"]


def test_a_step_done_again_replaces_the_folder_whole(tmp_path: Path) -> None:
    box = Checkpoints(tmp_path)
    (save(box, 5, "before") / "stale").write_text("")
    assert_whole(save(box, 5, "after"))
    assert names(tmp_path / "step_5") == ["hf", "state"]
    assert read_state(tmp_path / "step_5")["generation"] == "after"
    assert names(tmp_path) == ["latest", "step_5"]


def test_a_relative_folder_is_the_same_for_a_rank_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Checkpoints("here").folder == tmp_path / "here"
    save(Checkpoints("here"), 1)
    assert find_checkpoint("auto", "here") == tmp_path / "here" / "step_1"


# --- limits


def test_the_newest_stay_and_the_best_beside_them(tmp_path: Path) -> None:
    box = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        save(box, step)
    box.mark_best(1)
    for step in (9, 10, 11):
        save(box, step)
    assert names(tmp_path) == ["best", "latest", "step_1", "step_10", "step_11"]
    assert (tmp_path / "best").read_text() == "step_1\n"
    box.mark_best(11)
    assert names(tmp_path) == ["best", "latest", "step_10", "step_11"]
    assert (tmp_path / "best").read_text() == "step_11\n"
    # Within the limits the former best stays.
    box.mark_best(10)
    assert names(tmp_path) == ["best", "latest", "step_10", "step_11"]


@pytest.mark.parametrize(
    ("max_bytes", "left"), [(3333, [1, 2, 3]), (3332, [2, 3]), (2222, [2, 3]), (2221, [3]), (1, [3])]
)
def test_the_oldest_go_until_all_together_fit(tmp_path: Path, max_bytes: int, left: list[int]) -> None:
    # 1000 bytes, 3 of trainer.json, and two names with two digests, 108 bytes: 1111 bytes a step.
    box = Checkpoints(tmp_path, keep=9, max_bytes=max_bytes)
    for step in (1, 2, 3):
        box.save(step, {}, lambda folder: (folder / "weights").write_bytes(b"w" * 1000))
    assert names(tmp_path) == ["latest", *[f"step_{step}" for step in left]]


def test_the_best_stays_where_the_bytes_are_not_enough_for_it(tmp_path: Path) -> None:
    box = Checkpoints(tmp_path, max_bytes=1)
    save(box, 1)
    box.mark_best(1)
    save(box, 2)
    save(box, 3)
    assert names(tmp_path) == ["best", "latest", "step_1", "step_3"]


def test_smaller_limits_apply_to_what_is_there_when_asked(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(Checkpoints(tmp_path), step)
    for keep, left in ((3, ["step_1", "step_2", "step_3"]), (1, ["step_3"]), (1, ["step_3"])):
        Checkpoints(tmp_path, keep=keep).prune()
        assert names(tmp_path) == ["latest", *left]


def test_steps_above_the_one_that_was_resumed_go_first(tmp_path: Path) -> None:
    box = Checkpoints(tmp_path, keep=3)
    for step in (4, 6, 8):
        save(box, step)
    # Resumed from step 4: 6 and 8 are of the run that was left.
    save(box, 5)
    assert names(tmp_path) == ["latest", "step_4", "step_5", "step_8"]
    save(box, 6)
    assert names(tmp_path) == ["latest", "step_4", "step_5", "step_6"]


# --- names that are wrong


def test_a_step_that_was_not_saved_is_not_the_best(tmp_path: Path) -> None:
    box = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match=says(tmp_path, "step_4", [])):
        box.mark_best(4)
    save(box, 5)
    box.mark_best(5)
    with pytest.raises(ValueError, match=says(tmp_path, "step_4", ["step_5"])):
        box.mark_best(4)
    assert (tmp_path / "best").read_text() == "step_5\n"


@pytest.mark.parametrize("name", ["step_11", "..", "step_9/hf"])
def test_a_name_of_nothing_lists_the_steps_there_are(tmp_path: Path, name: str) -> None:
    box = Checkpoints(tmp_path)
    for step in (9, 10):
        save(box, step)
    for file in ("latest", "best"):
        (tmp_path / file).write_text(name)
    with pytest.raises(ValueError, match=says(tmp_path / "latest", f"'{name}'", ["step_9", "step_10"])):
        box.latest()
    # It is in the way of nothing that follows.
    box.mark_best(10)
    save(box, 11)
    assert ((tmp_path / "best").read_text(), box.latest()) == ("step_10\n", tmp_path / "step_11")
    assert names(tmp_path) == ["best", "latest", "step_10", "step_11", "step_9"]


# --- state


def test_every_float_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    draw = random.Random(0)
    floats = [*struct.unpack("<5000d", draw.randbytes(40000)), 0.1, -0.0, 5e-324, 1.7976931348623157e308]
    state = {
        "floats": floats,
        "worst": math.nan,
        "best": {"reward": [-math.inf, math.inf]},
        "step": 2**70,
        "none": None,
    }
    folder = Checkpoints(tmp_path).save(1, state, lambda folder: None)
    back = read_state(folder)
    assert math.isnan(back.pop("worst"))
    # A NaN has many bit patterns and is one value here; all others are compared by their bits.
    expected = [math.nan if math.isnan(value) else value for value in floats]
    assert struct.pack("<5004d", *back.pop("floats")) == struct.pack("<5004d", *expected)
    assert back == {"best": {"reward": [-math.inf, math.inf]}, "step": 2**70, "none": None}


@pytest.mark.parametrize(
    ("state", "facts"),
    [
        ({"seen": {1: "a"}}, ["state.seen ", " 1;"]),
        ({"a": [0, {"b": {1, 2}}]}, ["state.a[1].b ", " set,"]),
        ({"path": Path("x")}, ["state.path ", "PosixPath"]),
    ],
)
def test_a_state_that_would_not_come_back_is_refused_before_anything_is_written(
    tmp_path: Path, state: dict[str, Any], facts: list[str]
) -> None:
    written: list[Path] = []
    with pytest.raises(ValueError, match=says(*facts)):
        Checkpoints(tmp_path).save(1, state, written.append)
    assert written == []
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (None, ["No such file or directory"]),
        ("", ["JSON", "Expecting value"]),
        ('{"step": 3', ["JSON", "Expecting"]),
    ],
)
def test_a_state_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, facts: list[object]) -> None:
    (tmp_path / "state").mkdir()
    if text is not None:
        (tmp_path / "state" / "trainer.json").write_text(text)
    with pytest.raises(ValueError, match=says(tmp_path / "state" / "trainer.json", *facts)):
        read_state(tmp_path)


# --- finding


def test_none_and_a_run_without_checkpoints_start_anew(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path), 1)
    assert find_checkpoint("none", tmp_path) is None
    assert find_checkpoint("auto", tmp_path / "missing") is None
    assert find_checkpoint("auto", tmp_path / "latest" / "below_a_file") is None
    Checkpoints(tmp_path / "empty")
    assert find_checkpoint("auto", tmp_path / "empty") is None


def test_a_step_a_folder_of_steps_and_a_run_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_place_without_a_checkpoint_is_refused_with_where_was_looked(tmp_path: Path) -> None:
    looked = (f"{tmp_path}/x,", f"{tmp_path}/x/latest", f"{tmp_path}/x/checkpoints/latest")
    with pytest.raises(ValueError, match=says(f"resume={tmp_path}/x:", *looked)):
        find_checkpoint(f"{tmp_path}/x", tmp_path)
    for resume in (f"{tmp_path}/step_3", "", " "):
        with pytest.raises(ValueError, match=f"resume={resume}:"):
            find_checkpoint(resume, tmp_path)
    with pytest.raises(ValueError, match="resume=~nobody_by_this_name/run"):
        find_checkpoint("~nobody_by_this_name/run", tmp_path)


def test_a_step_that_is_only_a_model_is_refused(tmp_path: Path) -> None:
    folder = save(Checkpoints(tmp_path), 3)
    shutil.rmtree(folder / "state")
    for resume in ("auto", str(folder), str(tmp_path)):
        with pytest.raises(ValueError, match=says(f"resume={resume}:", folder, "state/trainer.json")):
            find_checkpoint(resume, tmp_path)


def test_a_run_started_again_goes_on_from_what_it_saved_itself_and_not_from_what_another_left(tmp_path: Path) -> None:
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
def test_a_damaged_latest_is_named_and_the_newest_whole_one_before_it_taken(
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
    # Done again, it is whole.
    save(box, 11, "abc")
    assert find_checkpoint("auto", box.folder) == box.folder / "step_11"


def damage_file(file: Path, harm: str) -> None:
    data = file.read_bytes()
    if harm == "removed":
        file.unlink()
        return
    file.write_bytes({"emptied": b"", "cut": data[:-1], "changed": bytes([data[0] ^ 1]) + data[1:]}[harm])


def test_without_a_whole_one_before_it_a_damaged_latest_is_refused(tmp_path: Path) -> None:
    folder = save(Checkpoints(tmp_path), 3)
    damage_file(folder / "hf" / "model.bin", "emptied")
    for resume in ("auto", str(tmp_path)):
        with pytest.raises(ValueError, match=says("step_3", "hf/model.bin", "resume=none")):
            find_checkpoint(resume, tmp_path)


def test_a_step_whose_digests_are_lost_or_damaged_is_not_taken(tmp_path: Path) -> None:
    for step in (1, 2):
        save(Checkpoints(tmp_path), step)
    digests = tmp_path / "step_2" / "state" / "digests.json"
    for text in ("", "[]", "{", "[" * 100_000, "\0"):
        digests.write_text(text)
        assert find_checkpoint("auto", tmp_path) == tmp_path / "step_1"
    digests.unlink()
    assert find_checkpoint("auto", tmp_path) == tmp_path / "step_1"
    # The state may be lost with them.
    for text in ("", "[]", "{", "[" * 100_000):
        (tmp_path / "step_2" / "state" / "trainer.json").write_text(text)
        assert find_checkpoint("auto", tmp_path) == tmp_path / "step_1"


@pytest.mark.parametrize("harm", ["removed", "emptied"])
def test_without_latest_the_newest_whole_step_is_taken_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    for step in (1, 2, 3):
        save(Checkpoints(tmp_path), step)
    damage_file(tmp_path / "step_3" / "hf" / "model.bin", "cut")
    damage_file(tmp_path / "latest", harm)
    assert find_checkpoint("auto", tmp_path) == tmp_path / "step_2"
    assert re.search(says(f"{tmp_path}/latest", "step_2"), caplog.text)
    # And nothing begins anew over them.
    with pytest.raises(ValueError, match=says(tmp_path, "step_2", "resume=auto")):
        check_resume("none", tmp_path)


# --- options


def test_options_that_changed_are_listed_in_the_order_of_now() -> None:
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
