"""recipes/openrlhf_ppo/algorithm.py: what each estimator and penalty makes of the same four answers, by hand."""

from typing import Any

import pytest
import torch

from components.batch import Batch
from recipes.openrlhf_ppo.algorithm import add_advantages, shaped_rewards
from recipes.openrlhf_ppo.config import PPOConfig


def config(**changes: Any) -> PPOConfig:
    """Two prompts, two answers each, no reference."""
    common: dict[str, Any] = {"pretrain": "x", "prompt_data": "x", "scorer": "sort", "init_kl_coef": 0.0}
    sizes: dict[str, Any] = {
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "train_batch_size": 4,
        "generate_max_len": 8,
    }
    return PPOConfig(**(common | sizes | changes))


def answers() -> Batch:
    """Prompts of one token and answers of 1, 2, 2 and 3; the groups' answers are not next to each other."""
    mask = [False, True] + [False, True, True] * 2 + [False, True, True, True]
    return Batch(
        [2, 3, 3, 4],
        {"tokens": torch.arange(12), "action_mask": torch.tensor(mask), "value": torch.zeros(12)},
        {
            "reward": torch.tensor([1.0, 4.0, 3.0, 2.0]),
            "prompt_id": torch.tensor([7, 5, 7, 5]),
            "truncated": torch.tensor([False, False, False, True]),
        },
    )


@pytest.mark.parametrize(
    ("estimator", "shaped"),
    [
        ("reinforce", [1.0, 4.0, 3.0, 2.0]),
        # group 7 is 1 and 3, group 5 is 4 and 2: means 2 and 3
        ("reinforce_baseline", [-1.0, 1.0, 1.0, -1.0]),
        ("dr_grpo", [-1.0, 1.0, 1.0, -1.0]),
        # less the other one
        ("rloo", [-2.0, 2.0, 2.0, -2.0]),
        # both standard deviations are the square root of 2
        ("group_norm", [-(2**-0.5), 2**-0.5, 2**-0.5, -(2**-0.5)]),
        ("gae", [1.0, 4.0, 3.0, 2.0]),
    ],
)
def test_answers_are_compared_within_the_group_of_their_prompt(estimator: str, shaped: list[float]) -> None:
    found = shaped_rewards(answers(), config(advantage_estimator=estimator))
    assert found.tolist() == pytest.approx(shaped, abs=1e-6)


@pytest.mark.parametrize("estimator", ["rloo", "group_norm", "dr_grpo"])
def test_without_a_discount_each_token_has_the_advantage_of_its_answer(estimator: str) -> None:
    settings = config(advantage_estimator=estimator)
    experience = add_advantages(answers(), settings)
    a, b, c, d = shaped_rewards(answers(), settings).tolist()
    assert experience["advantage"].tolist() == pytest.approx([0, a, 0, b, b, 0, c, c, 0, d, d, d], abs=1e-6)


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "reinforce_baseline"])
def test_whitened_advantages_have_mean_zero_and_variance_one(estimator: str) -> None:
    experience = add_advantages(answers(), config(advantage_estimator=estimator))
    advantage_M = experience["advantage"][experience["action_mask"]]
    assert advantage_M.mean().item() == pytest.approx(0, abs=1e-6)
    assert advantage_M.square().mean().item() == pytest.approx(1, abs=1e-5)


def test_reinforce_without_std_norm_only_centres_the_discounted_returns() -> None:
    settings = config(advantage_estimator="reinforce", no_advantage_std_norm=True, gamma=0.5)
    experience = add_advantages(answers(), settings)
    # Returns: 1 | 2 4 | 1.5 3 | 0.5 1 2, of which the mean is 15 / 8.
    returns = [1, 2, 4, 1.5, 3, 0.5, 1, 2]
    mask_N = experience["action_mask"]
    assert experience["return"][mask_N].tolist() == pytest.approx(returns)
    assert experience["advantage"][mask_N].tolist() == pytest.approx([x - 15 / 8 for x in returns])


def test_an_answer_pays_for_the_tokens_of_the_buffer_that_it_uses() -> None:
    # Allowed without a penalty: 8 - 6 = 2 tokens. The last answer has 3: one sixth of the buffer, times 3.
    found = shaped_rewards(answers(), config(overlong_buffer_len=6, overlong_penalty_factor=3.0))
    assert found.tolist() == pytest.approx([1.0, 4.0, 3.0, 1.5])


@pytest.mark.parametrize(("coef", "last"), [(0.0, 0.0), (0.25, 0.5), (-1.0, -1.0)])
def test_only_the_answer_that_was_cut_off_is_penalised(coef: float, last: float) -> None:
    found = shaped_rewards(answers(), config(stop_properly_penalty_coef=coef))
    assert found.tolist() == pytest.approx([1.0, 4.0, 3.0, last])


def test_rewards_are_cut_to_their_range_after_the_comparison() -> None:
    settings = config(advantage_estimator="rloo", reward_clip_range=(-1.5, 0.5))
    assert shaped_rewards(answers(), settings).tolist() == [-1.5, 0.5, 0.5, -1.5]


def test_a_prompt_with_equal_rewards_teaches_nothing() -> None:
    equal = answers().with_sequences(reward=torch.tensor([0.1, 4.0, 0.1, 2.0]))
    experience = add_advantages(equal, config(advantage_estimator="group_norm"))
    assert experience["advantage"][:2].tolist() == [0.0, 0.0]
    assert experience["advantage"][5:8].tolist() == [0.0, 0.0, 0.0]
