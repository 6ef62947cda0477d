"""The sentence about a rank that is waited for, with real ranks that are stopped in each kind of collective."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.components.helpers.ranks import run_ranks
from tests.messages import says
from tests.plugins.collective_watch.stopped import kinds, waits


@pytest.mark.full
def test_a_wait_names_the_collective_the_layer_and_the_rank_that_is_stopped(tmp_path: Path) -> None:
    reports, others = run_ranks(waits, 2, tmp_path)
    assert others == []
    for name, report in zip(kinds(), reports, strict=False):
        waiting = f"rank 0 of ACTOR waits in {name} of layer 1 (the forward pass) for rank 1, which has not responded"
        assert re.search(says(waiting, "was last in the optimizer step", "without progress"), report), report
    alive = "rank 0 of ACTOR waits in barrier of layer 1 (the forward pass) for rank 1, which is in the optimizer step"
    assert reports[len(kinds())].startswith(alive)
