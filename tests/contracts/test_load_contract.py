"""First contract of every part: it can be imported."""

from __future__ import annotations

import pytest

from tests.contracts.targets import Target, Unusable


def test_the_target_can_be_imported(any_target: Target | Unusable) -> None:
    if isinstance(any_target, Unusable):
        pytest.fail(any_target.reason, pytrace=False)
