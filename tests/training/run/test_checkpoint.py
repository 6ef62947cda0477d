"""Step folders: contents, retention, and restored state."""

import math
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from plugins.resume.checkpoints import find_checkpoint, read_state
from tests.messages import says
from tests.training.run.checkpoint_steps import assert_whole, names, save
from training.run.checkpoint import Checkpoints, step_of


def test_a_saved_step_is_complete_and_named_as_latest(tmp_path: Path) -> None:
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


def test_write_gets_an_empty_temporary_folder_that_readers_ignore(tmp_path: Path) -> None:
    seen: list[Path] = []

    def write(folder: Path) -> None:
        seen.append(folder)
        assert [path.relative_to(folder) for path in folder.rglob("*")] == [Path("state")]
        assert find_checkpoint("auto", folder.parent) is None

    Checkpoints(tmp_path).save(1, {}, write)
    assert [path.name for path in seen] == [".step_1.partial"]


def test_saving_a_step_again_replaces_its_whole_folder(tmp_path: Path) -> None:
    box = Checkpoints(tmp_path)
    (save(box, 5, "before") / "stale").write_text("")
    assert_whole(save(box, 5, "after"))
    assert names(tmp_path / "step_5") == ["hf", "state"]
    assert read_state(tmp_path / "step_5")["generation"] == "after"
    assert names(tmp_path) == ["latest", "step_5"]


def test_a_relative_folder_is_resolved_for_ranks_in_other_working_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Checkpoints("here").folder == tmp_path / "here"
    save(Checkpoints("here"), 1)
    assert find_checkpoint("auto", "here") == tmp_path / "here" / "step_1"


# --- limits


def test_the_newest_checkpoints_and_the_best_one_are_kept(tmp_path: Path) -> None:
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
    # The former best step is kept within the limits.
    box.mark_best(10)
    assert names(tmp_path) == ["best", "latest", "step_10", "step_11"]


@pytest.mark.parametrize(
    ("max_bytes", "left"), [(3333, [1, 2, 3]), (3332, [2, 3]), (2222, [2, 3]), (2221, [3]), (1, [3])]
)
def test_the_oldest_checkpoints_are_removed_until_the_total_size_fits(
    tmp_path: Path, max_bytes: int, left: list[int]
) -> None:
    # 1000 bytes, 3 of trainer.json, and two names with two digests, 108 bytes: 1111 bytes per step.
    box = Checkpoints(tmp_path, keep=9, max_bytes=max_bytes)
    for step in (1, 2, 3):
        box.save(step, {}, lambda folder: (folder / "weights").write_bytes(b"w" * 1000))
    assert names(tmp_path) == ["latest", *[f"step_{step}" for step in left]]


def test_the_best_checkpoint_is_kept_even_above_the_size_limit(tmp_path: Path) -> None:
    box = Checkpoints(tmp_path, max_bytes=1)
    save(box, 1)
    box.mark_best(1)
    save(box, 2)
    save(box, 3)
    assert names(tmp_path) == ["best", "latest", "step_1", "step_3"]


def test_lowered_limits_apply_to_existing_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(Checkpoints(tmp_path), step)
    for keep, left in ((3, ["step_1", "step_2", "step_3"]), (1, ["step_3"]), (1, ["step_3"])):
        Checkpoints(tmp_path, keep=keep).prune()
        assert names(tmp_path) == ["latest", *left]


def test_steps_after_the_resumed_one_are_removed_first(tmp_path: Path) -> None:
    box = Checkpoints(tmp_path, keep=3)
    for step in (4, 6, 8):
        save(box, step)
    # Resumed from step 4: steps 6 and 8 belong to the abandoned run.
    save(box, 5)
    assert names(tmp_path) == ["latest", "step_4", "step_5", "step_8"]
    save(box, 6)
    assert names(tmp_path) == ["latest", "step_4", "step_5", "step_6"]


# --- names that are wrong


def test_only_a_saved_step_can_be_the_best(tmp_path: Path) -> None:
    box = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match=says(tmp_path, "step_4", [])):
        box.mark_best(4)
    save(box, 5)
    box.mark_best(5)
    with pytest.raises(ValueError, match=says(tmp_path, "step_4", ["step_5"])):
        box.mark_best(4)
    assert (tmp_path / "best").read_text() == "step_5\n"


@pytest.mark.parametrize("name", ["step_11", "..", "step_9/hf"])
def test_an_unknown_step_raises_an_error_with_the_existing_steps(tmp_path: Path, name: str) -> None:
    box = Checkpoints(tmp_path)
    for step in (9, 10):
        save(box, step)
    for file in ("latest", "best"):
        (tmp_path / file).write_text(name)
    with pytest.raises(ValueError, match=says(tmp_path / "latest", f"'{name}'", ["step_9", "step_10"])):
        box.latest()
    # It does not prevent later writes.
    box.mark_best(10)
    save(box, 11)
    assert ((tmp_path / "best").read_text(), box.latest()) == ("step_10\n", tmp_path / "step_11")
    assert names(tmp_path) == ["best", "latest", "step_10", "step_11", "step_9"]


# --- state


def test_every_float_is_restored_bit_equal(tmp_path: Path) -> None:
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
    # A NaN has many bit patterns and counts as one value here. All others are compared by their bits.
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
def test_a_state_that_cannot_be_restored_is_refused_before_writing(
    tmp_path: Path, state: dict[str, Any], facts: list[str]
) -> None:
    written: list[Path] = []
    with pytest.raises(ValueError, match=says(*facts)):
        Checkpoints(tmp_path).save(1, state, written.append)
    assert written == []
    assert names(tmp_path) == []
