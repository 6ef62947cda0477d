"""A model that is made empty, and read by whoever keeps its parts, is the model that is loaded whole."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.components.engines import empty_worker
from tests.components.engines.empty_worker import CASES
from tests.components.engines.ranks import WORLD_SIZES, run_ranks


@pytest.fixture(scope="module", params=WORLD_SIZES)
def ranks(
    request: pytest.FixtureRequest, tied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[bool, Any]]]:
    return run_ranks(empty_worker.both_ways, request.param, tmp_path_factory.mktemp("empty"), str(tied_model))


@pytest.mark.parametrize("case", CASES)
def test_training_a_model_made_empty_is_training_the_whole_one_bit_for_bit(
    ranks: list[dict[str, dict[bool, Any]]], case: str
) -> None:
    for record in ranks:
        whole, empty = record[case][False], record[case][True]
        for moment in ("first", "last"):
            assert list(empty[moment]) == list(whole[moment])
            assert all(torch.equal(empty[moment][name], whole[moment][name]) for name in whole[moment])
        assert empty["metrics"] == whole["metrics"]
        assert torch.equal(empty["random"], whole["random"])
        assert empty["bytes"] == whole["bytes"]
