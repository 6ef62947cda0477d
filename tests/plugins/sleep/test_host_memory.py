"""Sleep of both training engines, with one process and with two ranks."""

from pathlib import Path

import pytest

from tests.components.helpers import option_cases as options
from tests.components.helpers.option_runs import Runs, same_bits
from tests.components.helpers.ranks import NIGHTLY_ON_TWO


@pytest.fixture(scope="module")
def runs(tied_model: Path, other_tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("options"), tied_model, other_tied_model)


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
@pytest.mark.parametrize("case", options.ASLEEP | options.COUNTED)
def test_a_sleeping_engine_leaves_no_tensor_on_the_device(runs: Runs, world_size: int, case: str) -> None:
    for rank in runs.asleep(world_size):
        record = rank[f"{case}-asleep"]
        # Weights and two moments, in float32 at least.
        size = sum(tensor.nbytes for tensor in runs.asleep(1)[0][f"{case}-True"]["masters"].values())
        assert record["bytes"] >= 3 * size / world_size * (1 if case != "zero-0" else world_size)
        assert record["left"] == 0


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
@pytest.mark.parametrize("case", options.ASLEEP)
def test_an_engine_is_bit_equal_after_sleep_and_rejects_calls_while_asleep(
    runs: Runs, world_size: int, case: str
) -> None:
    for rank in runs.asleep(world_size):
        record = rank[f"{case}-asleep"]
        assert record["freed"] == 0
        assert len(record["messages"]) == 6
        assert all("wake()" in message for message in record["messages"])
        slept, awake = rank[f"{case}-True"], rank[f"{case}-False"]
        assert slept["metrics"] == awake["metrics"]
        assert same_bits(slept["masters"], awake["masters"])
        assert same_bits(slept["weights"], awake["weights"])
