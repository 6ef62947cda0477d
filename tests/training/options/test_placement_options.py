"""Placement that no machine can have is rejected before anything starts."""

from __future__ import annotations

import pytest

from tests.messages import says
from training.options.placement_options import PlacementOptions


@pytest.mark.parametrize("colocate", [True, False])
def test_engine_of_more_gpus_than_a_machine_has_is_rejected_with_the_reason(colocate: bool) -> None:
    options = PlacementOptions(nodes=2, colocate=colocate)
    with pytest.raises(ValueError, match=says("rollout.tensor_parallel=16", "8 GPUs", "cannot span machines")):
        options.resolved(8, groups=2, tensor_parallel=16)
    assert options.resolved(8, groups=2, tensor_parallel=8).rollout_engines == (2 if colocate else 1)
