"""The default rollout strategy, and options that name one whose plug-in is missing."""

import pytest
import torch

from components.batch import Batch
from recipes.grpo.config import GRPOConfig
from recipes.grpo.main import read_config
from tests.messages import says
from training.options.schema import ConfigError
from training.run.strategies import WholeSteps


def test_by_default_a_step_is_the_rollouts_of_its_prompts() -> None:
    requests: list[tuple[int, int]] = []

    def make(count: int, step: int) -> Batch:
        requests.append((count, step))
        return Batch([1], {"tokens": torch.tensor([step])})

    strategy = WholeSteps(make, 4)
    assert strategy.fill(3)["tokens"].tolist() == [3]
    assert requests == [(4, 3)]
    assert (strategy.waiting, strategy.has_ended, strategy.sources(), strategy.metrics) == (0, False, {}, {})


@pytest.mark.parametrize(
    ("option", "strategy"),
    [
        (["algorithm.filter_range=[0,1]"], "dynamic_sampling"),
        (
            ["asynchronous.enabled=true", "asynchronous.partial_rollout=true", "placement.colocate=false"],
            "partial_rollouts",
        ),
    ],
)
def test_an_option_whose_plug_in_is_missing_is_refused(
    option: list[str], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["data.path=task:sort", *option]
    config: GRPOConfig = read_config(arguments)
    assert config.rollout_strategy[0] == strategy
    monkeypatch.setattr("training.options.rl_options.names", lambda kind: [])
    with pytest.raises(ConfigError, match=says(strategy, "plugins/", "unset")):
        read_config(arguments)
