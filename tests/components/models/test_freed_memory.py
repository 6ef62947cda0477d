"""Memory that a process keeps after tensors are freed."""

from pathlib import Path

from tests.components.helpers.freed_worker import kept_when_freed
from tests.components.helpers.ranks import run_ranks


def test_freed_memory_of_a_large_model_is_returned_and_that_of_a_small_one_is_kept(tmp_path: Path) -> None:
    ((large, small),) = run_ranks(kept_when_freed, 1, tmp_path)
    assert small >= 2**27
    assert large < 2**24
