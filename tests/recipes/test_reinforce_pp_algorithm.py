"""recipes/reinforce_pp/algorithm.py: the effect of each option on the same four responses, calculated by hand."""

import math
from typing import Any

import pytest
import torch

from components.batch import Batch
from recipes.reinforce_pp.algorithm import add_advantages, shaped_rewards
from recipes.reinforce_pp.config import AlgorithmOptions, ReinforceConfig
from recipes.reinforce_pp.main import read_config

HALF = math.log(2)


def config(**algorithm: Any) -> ReinforceConfig:
    """Two prompts with two responses each. No KL and no whitening unless an option enables it."""
    common = read_config(["model.path=x", "data.path=task:sort", "prompts_per_step=2", "samples_per_prompt=2"])
    common.algorithm = AlgorithmOptions(**({"kl_coef": 0.0, "whiten": False} | algorithm))
    return common


def responses() -> Batch:
    """Prompts of one token and responses of 1, 2, 2 and 3 tokens. The responses of a group are not adjacent."""
    mask = [False, True] + [False, True, True] * 2 + [False, True, True, True]
    return Batch(
        [2, 3, 3, 4],
        {
            "tokens": torch.arange(12),
            "action_mask": torch.tensor(mask),
            # The second response's tokens are twice as likely under the policy as under the reference. All others
            # agree.
            "logprob": torch.full((12,), -1.0),
            "reference_logprob": torch.tensor([-1, -1, -1, -1 - HALF, -1 - HALF, -1, -1, -1, -1, -1, -1, -1]),
        },
        {"reward": torch.tensor([1.0, 4.0, 3.0, 2.0]), "prompt_id": torch.tensor([7, 5, 7, 5])},
    )


def learnt(**algorithm: Any) -> list[float]:
    """Return the advantages of the policy's eight tokens."""
    experience = add_advantages(responses(), config(**algorithm))
    assert experience["advantage"][~experience["action_mask"]].tolist() == [0.0] * 4
    return experience["advantage"][experience["action_mask"]].tolist()


@pytest.mark.parametrize(
    ("baseline", "shaped"),
    [
        ("none", [1.0, 4.0, 3.0, 2.0]),
        # Group 7 has 1 and 3, group 5 has 4 and 2: minus the means 2 and 3,
        ("group_mean", [-1.0, 1.0, 1.0, -1.0]),
        # and minus the other one.
        ("leave_one_out", [-2.0, 2.0, 2.0, -2.0]),
    ],
)
def test_each_baseline_subtracts_its_value_from_the_reward(baseline: Any, shaped: list[float]) -> None:
    a, b, c, d = shaped
    assert shaped_rewards(responses(), config(baseline=baseline)).tolist() == shaped
    assert learnt(baseline=baseline) == pytest.approx([a, b, b, c, c, d, d, d])


def test_rewards_are_clipped_to_their_range_after_the_baseline() -> None:
    shaped = shaped_rewards(responses(), config(baseline="leave_one_out", reward_range=(-1.5, 0.5)))
    assert shaped.tolist() == [-1.5, 0.5, 0.5, -1.5]


def test_a_discount_reduces_the_advantage_of_early_tokens() -> None:
    assert learnt(gamma=0.5) == pytest.approx([1, 2, 4, 1.5, 3, 0.5, 1, 2])


@pytest.mark.parametrize(
    ("estimator", "each"),
    # d is ln 2 at the two tokens of the second response.
    [("k1", HALF), ("abs", HALF), ("k2", HALF**2 / 2), ("k3", 0.5 - 1 + HALF)],
)
def test_the_kl_is_subtracted_per_token_and_the_reward_is_added_to_the_last_token(estimator: Any, each: float) -> None:
    # Without a discount the last token is charged its own KL, the first token that of both.
    pays = 0.1 * each
    learned = learnt(kl_coef=0.1, kl_estimator=estimator)
    assert learned == pytest.approx([1, 4 - 2 * pays, 4 - pays, 3, 3, 2, 2, 2], abs=1e-6)


def test_whitening_uses_all_tokens_of_the_step_and_so_weights_long_responses_more() -> None:
    # 1 once, 4 twice, 3 twice, 2 three times: mean 21 / 8, mean square 63 / 8, so the variance is 63 / 64.
    spread = math.sqrt(63 / 64)
    expected = [(x - 21 / 8) / spread for x in (1, 4, 4, 3, 3, 2, 2, 2)]
    assert learnt(whiten=True) == pytest.approx(expected, abs=1e-4)


def test_reinforce_pp_baseline_subtracts_the_baseline_before_whitening() -> None:
    # -1, 1 1, 1 1, -1 -1 -1 already has mean 0 and variance 1.
    assert learnt(whiten=True, baseline="group_mean") == pytest.approx([-1, 1, 1, 1, 1, -1, -1, -1], abs=1e-4)
