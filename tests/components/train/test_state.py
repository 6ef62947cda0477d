"""A state saved by one process is continued by another one, with one rank and with two, with both engines.

The loading processes start from other weights. Each kind runs once, and every test reads its record.
"""

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from components.train.collective_io import disk_errors
from tests.components.helpers import train_worker as worker
from tests.components.helpers.ranks import WORLD_SIZES, run_ranks
from tests.messages import says

Record = dict[str, dict[str, Any]]


class Runs:
    """Records of the ranks by world size. Each run starts when a test first requests it."""

    def __init__(self, root: Path, model: Path, other_model: Path) -> None:
        self.root = root
        self._models = {"save": model, "load": other_model, "cross": other_model}
        self._records: dict[str, list[Record]] = {}

    def _run(self, kind: str, work: Callable[..., Record], world_size: int, *folders: Path) -> list[Record]:
        name = f"{kind}{world_size}"
        if name not in self._records:
            arguments = (str(self._models[kind]), self.root / "states", *folders)
            self._records[name] = run_ranks(work, world_size, self.root / name, *arguments)
        return self._records[name]

    def saved(self, world_size: int) -> list[Record]:
        """Return the record of each rank that saves a state."""
        return self._run("save", worker.save_states, world_size)

    def loaded(self, world_size: int) -> list[Record]:
        """Return the record of each rank that starts from other weights and loads a state of the same world size."""
        self.saved(world_size)
        return self._run("load", worker.load_states, world_size, self.root / f"load{world_size}")

    def crossed(self, world_size: int) -> list[Record]:
        """Return the record of each rank that loads a state of the other world size."""
        self.saved(3 - world_size)
        return self._run("cross", worker.load_crossed, world_size, self.root / f"cross{world_size}")

    def state(self, world_size: int, case: str) -> dict[str, Tensor]:
        return read(self.root / "states" / str(world_size) / case)


@pytest.fixture(scope="module")
def runs(tied_model: Path, other_tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("states"), tied_model, other_tied_model)


def read(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a state, except those that are stored per rank."""
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("rank_*.safetensors"):
        with safe_open(path, framework="pt") as reader:
            tensor_of = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 - a reader is no dict
        assert not tensors.keys() & tensor_of.keys()
        tensors |= tensor_of
    return tensors


def note(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "engine.json").read_text())


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Check equality of names, types, shapes and bits: 0.0 differs from -0.0."""

    def bits(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.dtype, tensor.shape, tensor.contiguous().view(-1).view(torch.uint8).tolist()

    return one.keys() == other.keys() and all(bits(one[name]) == bits(other[name]) for name in one)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that metrics, weights, buffers and outputs are bit-equal."""
    assert one.get("metrics") == other.get("metrics")
    assert one["step_count"] == other["step_count"]
    assert same_bits(one["weights"], other["weights"])
    assert same_bits(one["buffers"], other["buffers"])
    assert same_bits({"output": one["output"]}, {"output": other["output"]})


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", worker.IN_ONE_GO)
def test_saving_a_state_does_not_change_the_training(runs: Runs, world_size: int, case: str) -> None:
    for record in runs.saved(world_size):
        whole = record[f"in_one_go-{case}"]
        metrics = record[case]["saved"]["metrics"] + record[case]["metrics"]
        assert whole["step_count"] == 4
        assert_same(record[case] | {"metrics": metrics}, whole)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", worker.STATES)
def test_another_process_resumes_bit_equal(runs: Runs, world_size: int, case: str) -> None:
    for saved, loaded in zip(runs.saved(world_size), runs.loaded(world_size), strict=True):
        assert loaded[case]["inexact"] == []
        assert_same(loaded[case]["loaded"], {**saved[case]["saved"], "metrics": None})
        assert loaded[case]["step_count"] == 4
        assert_same(loaded[case], saved[case])
    assert same_bits(read(runs.root / f"load{world_size}" / case), runs.state(world_size, case))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", worker.FRESH)
def test_a_state_saved_before_the_first_step_can_be_resumed(runs: Runs, world_size: int, case: str) -> None:
    for saved, loaded in zip(runs.saved(world_size), runs.loaded(world_size), strict=True):
        actual = loaded[f"fresh-{case}"]
        assert actual["inexact"] == []
        assert_same(actual["loaded"], saved[f"fresh-{case}"]["saved"])
        assert_same(actual, saved[case]["saved"])
    state = runs.state(world_size, f"fresh-{case}")
    assert len(state) == 26
    assert {name.rpartition("/")[2] for name in state} == {"weight"}


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("saved", "loaded"), worker.CROSSED)
def test_other_ranks_and_stages_resume_with_an_equal_state_and_losses_up_to_rounding(
    runs: Runs, world_size: int, saved: str, loaded: str
) -> None:
    other = 3 - world_size
    record = runs.crossed(world_size)[0][f"{saved}-{loaded}"]
    assert same_bits(read(runs.root / f"cross{world_size}" / f"{saved}-{loaded}"), runs.state(other, saved))
    inexact = record["inexact"]
    assert re.findall(r"\d+", inexact[0]) == [str(other), str(world_size)]
    before, after = worker.STATES[saved], worker.STATES[loaded]
    settings = ("zero_stage", "engine", "precision", "adam_offload")
    changed = [name for name in settings if before.get(name) != after.get(name)]
    assert [re.findall(r"(\w+)=", line) for line in inexact[1:]] == [[name, name] for name in changed]
    for actual, expected in zip(record["metrics"], runs.saved(other)[0][saved]["metrics"], strict=True):
        assert actual["learning_rate"] == expected["learning_rate"]
        if "odd" in saved:
            assert actual["loss"] != expected["loss"]  # the random state of dropout is not restored
        elif "bf16" in saved + loaded:
            assert actual["loss"] == pytest.approx(expected["loss"], rel=0.02)
        else:
            assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-6)
            assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_files_hold_the_master_weights_and_moments_of_each_stage(runs: Runs, world_size: int) -> None:
    """At stage 0 torch's AdamW has them. Up to rounding, float32 training is equal at every stage."""
    expected = runs.state(1, "fp32-0")
    assert len(expected) == 26 * 3
    for name, weight in runs.saved(1)[0]["fp32-0"]["saved"]["weights"].items():
        assert torch.equal(expected[f"{name}/weight"], weight)
    for case in ("fp32-1", "fp32-2", "fp32-3", "offload-2"):
        tensors = runs.state(world_size, case)
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensors[name].dtype == torch.float32
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=1e-6 if "weight" in name else 1e-8)
        assert note(runs.root / "states" / str(world_size) / case)["adam_step"] == worker.HALF


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_files_hold_the_weights_that_deepspeed_returns(runs: Runs, world_size: int) -> None:
    state = runs.state(world_size, "one_group-1")
    for key, tensor in runs.saved(world_size)[0]["one_group-1"]["public"].items():
        assert torch.equal(state[f"model.layers.1.mlp.up_proj.weight/{key}"], tensor)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bfloat16_weights_are_the_rounded_masters(runs: Runs, world_size: int) -> None:
    state = runs.state(world_size, "bf16-3")
    weights = runs.loaded(world_size)[0]["bf16-3"]["loaded"]["weights"]
    assert all(torch.equal(state[f"{name}/weight"].bfloat16(), weight) for name, weight in weights.items())
    assert any(not torch.equal(state[f"{name}/weight"], weight.float()) for name, weight in weights.items())


@pytest.mark.full
def test_each_parameter_is_written_once_by_one_rank(runs: Runs) -> None:
    folder = runs.root / "states" / "2" / "fp32-3"
    first, second = ((folder / f"rank_{rank}.safetensors").stat().st_size for rank in (0, 1))
    assert abs(first - second) < 0.1 * (first + second)
    entries = note(folder)
    assert (entries["world_size"], entries["zero_stage"], entries["step_count"], entries["format"]) == (2, 3, 2, 1)
    shapes = {name: entry["shape"] for name, entry in entries["parameters"].items()}
    assert shapes["model.embed_tokens.weight"] == [20, 64]
    assert len(shapes) == 26


@pytest.mark.full
def test_resumed_buffers_come_from_rank_0_and_frozen_weights_have_no_moments(runs: Runs) -> None:
    # Each rank counted its own tokens. With another number of ranks, all of them resume from the count of rank 0.
    counts = [record["odd-2"]["loaded"]["buffers"]["seen"].item() for record in runs.loaded(2)]
    assert counts[0] != counts[1]
    assert runs.crossed(1)[0]["odd-2-odd-3"]["loaded"]["buffers"]["seen"].item() == counts[0]
    assert "scratch" not in note(runs.root / "states" / "1" / "odd-0")["buffers"]
    state = runs.state(2, "odd-3")
    assert "model.layers.0.mlp.up_proj.weight/weight" in state
    assert "model.layers.0.mlp.up_proj.weight/exp_avg" not in state
    assert "model.layers.1.mlp.up_proj.weight/exp_avg" in state


BROKEN = {
    "nothing": ["engine.json"],
    "no_note": ["engine.json"],
    "no_file": [".safetensors", "engine.json"],
    "half_a_file": [".safetensors"],
    "half_a_note": ["engine.json", "char"],
    "newer": ["engine.json", "format=2", 1],
    "other_shape": ["model.layers.0.mlp.gate_proj.weight", [127, 64], [128, 64]],
}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_state_is_refused_by_all_ranks_without_changes(runs: Runs, world_size: int, name: str) -> None:
    errors = [record["errors"] for record in runs.loaded(world_size)]
    folder = f"{name}{world_size - 1}"
    assert re.search(says(folder, *BROKEN[name]), errors[-1][name])
    assert all(error[name].startswith("ValueError None: ") for error in errors)
    assert all(f"rank {world_size - 1}" in error[name] for error in errors[:-1])
    assert all(error["unchanged"] for error in errors)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_state_of_another_model_is_refused_with_the_first_difference(runs: Runs, world_size: int) -> None:
    for record in runs.loaded(world_size):
        assert re.search(r"fp32-2.* model\.\S+\.weight", record["errors"]["other_model"])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_full_disk_raises_on_all_ranks_and_training_can_continue(runs: Runs, world_size: int) -> None:
    """The files of the last rank are limited to 40,000 bytes."""
    errors = [record["errors"] for record in runs.loaded(world_size)]
    assert "File too large" in errors[-1]["full_disk"]
    assert all(error["full_disk"].startswith(f"OSError {errno.EFBIG}: ") for error in errors)
    assert all(f"rank {world_size - 1}" in error["full_disk"] for error in errors[:-1])
    assert not errors[0]["full_disk_note"]
    # Only rank 0 writes the model.
    assert ("no error" if world_size == 2 else f"OSError {errno.EFBIG}: ") in errors[0]["full_disk_hf"]
    assert all(error["folder_is_a_file"].startswith(f"FileExistsError {errno.EEXIST}") for error in errors)
    for record, saved in zip(runs.loaded(world_size), runs.saved(world_size), strict=True):
        assert record["errors"]["good"] == []
        assert_same(record["errors"]["goes_on"], saved["fp32-2"])


def test_a_write_error_of_a_library_has_the_errno_of_the_system() -> None:
    # tokenizers raises an Exception without a specific class.
    with pytest.raises(OSError, match=says("/a", "No space left on device")) as caught, disk_errors("write /a"):
        Tokenizer(WordLevel({"_": 0}, unk_token="_")).save("/dev/full")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match=says("/a", "Read-only file system")) as caught, disk_errors("write /a"):
        raise RuntimeError("Read-only file system")
    assert caught.value.errno == errno.EROFS
    with pytest.raises(RuntimeError, match="shapes differ"), disk_errors("write /a"):
        raise RuntimeError("shapes differ")
