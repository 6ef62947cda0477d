"""A configuration of grpo with a small model, and a machine whose speed is a round number."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from plugins.demo.tasks import TASKS
from plugins.demo.tiny_model import character_tokenizer
from recipes.grpo.main import read_config
from tests.components.conftest import write_model


@dataclass
class RoundSpeed:
    """A machine with 1e9 operations and bytes per second."""

    device: str = "round"
    source: str = "measured"
    host_copy: float = 1e9
    disk: float = 1e9
    network: float = 1e9

    def peak(self, precision: str, threads: int) -> float:
        assert precision == "float32"
        return 1e9 * threads

    def bandwidth(self, working_set: float, threads: int) -> float:
        return 1e9

    def passes(self, kind: str, threads: int) -> Any:
        return None


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("light") / "model", seed=1, tied=True)


@pytest.fixture
def config(model: Path) -> Any:
    """The resolved configuration: 8 prompts with 4 responses of at most 16 tokens, in 2 optimizer steps."""
    options = ["data.path=task:sort", "prompts_per_step=8", "samples_per_prompt=4", "rollout.max_new_tokens=16"]
    requested = read_config([f"model.path={model}", *options, "train.mini_batch_size=16"])
    rollout, _ = requested.rollout.chosen(0, str(model), 1.0)
    placement = replace(requested.placement, actor_ranks=1, rollout_engines=1)
    return replace(requested, rollout=rollout, placement=placement, train=requested.train.resolved(0))


@pytest.fixture(scope="session")
def model_with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model for the task `sort`."""
    folder = write_model(tmp_path_factory.mktemp("light") / "sort", seed=1, tied=True)
    character_tokenizer(TASKS["sort"].alphabet).save_pretrained(folder)
    return folder
