"""plugins/kernels and plugins/layer_kernels: training with fused kernels equals training with plain ones."""

from pathlib import Path

import pytest

from tests.plugins.kernels.conftest import Interpret

TIERS = {
    **dict.fromkeys(("qwen2", "gemma2"), pytest.mark.full),
    **dict.fromkeys(("gemma", "gemma3_text", "llama", "mistral", "phi3", "qwen3"), pytest.mark.nightly),
}
"""Mark of the test of each model type."""


@pytest.mark.parametrize("family", [pytest.param(family, marks=mark) for family, mark in TIERS.items()])
def test_training_with_fused_kernels_equals_training_with_plain_ones(
    family: str, interpret: Interpret, tmp_path: Path
) -> None:
    for case, differences in interpret("trained", family, tmp_path / family).items():
        assert differences["metrics"] < 1e-5, case
        assert differences["weights"] < 1e-5, case
