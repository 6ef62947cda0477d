"""Interpolation of the weights of a frozen model."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from components.models.loading import load_policy
from components.train.config import FrozenConfig
from components.train.frozen import FrozenEngine
from plugins.reference_updates.weights import follow
from tests.recipe_copies import write_untrained


def test_weights_are_mixed_in_the_given_proportion(tmp_path: Path) -> None:
    one, other = write_untrained(tmp_path / "one"), write_untrained(tmp_path / "other", seed=1)
    engine = FrozenEngine(load_policy(one), FrozenConfig())
    follow(engine, str(other), 1.0, str(tmp_path / "mixed"), writes=True)
    actual, expected = (load_file(Path(folder) / "model.safetensors") for folder in (tmp_path / "mixed", other))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())
