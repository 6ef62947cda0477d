"""plugins/kernels: training with fused kernels equals training with plain ones, per model family."""

from pathlib import Path

import pytest

from tests.plugins.kernels.conftest import Interpret

FAMILIES = ("qwen2",)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_training_with_fused_kernels_equals_training_with_plain_ones(
    family: str, interpret: Interpret, tmp_path: Path
) -> None:
    for case, differences in interpret("trained", family, tmp_path / family).items():
        assert differences["metrics"] < 1e-5, case
        assert differences["weights"] < 1e-5, case
