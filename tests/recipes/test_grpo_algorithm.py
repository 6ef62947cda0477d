"""recipes/grpo/algorithm.py: the effect of each option on the same four responses, calculated by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from components.batch import Batch
from components.data.minibatches import shuffled_minibatches
from components.rl.aggregation import Totals
from recipes.grpo.algorithm import add_advantages, policy_loss, shaped_rewards
from recipes.grpo.config import AlgorithmOptions, GRPOConfig
from recipes.grpo.main import read_config
from training.options.rollout_options import RolloutOptions


def config(**algorithm: Any) -> GRPOConfig:
    """Two prompts with two responses each, of at most 4 tokens."""
    common = read_config(["model.path=x", "data.path=task:sort", "prompts_per_step=2", "samples_per_prompt=2"])
    common.rollout = RolloutOptions(max_new_tokens=4)
    common.algorithm = AlgorithmOptions(**algorithm)
    return common


def responses() -> Batch:
    """Prompts of one token and responses of 1, 2, 2 and 3 tokens. The responses of a group are not adjacent."""
    mask = [False, True] + [False, True, True] * 2 + [False, True, True, True]
    return Batch(
        [2, 3, 3, 4],
        {"tokens": torch.arange(12), "action_mask": torch.tensor(mask)},
        {"reward": torch.tensor([1.0, 4.0, 3.0, 2.0]), "prompt_id": torch.tensor([7, 5, 7, 5])},
    )


@pytest.mark.parametrize(
    ("std_norm", "worth"),
    [
        # Group 7 has 1 and 3, group 5 has 4 and 2: means 2 and 3, both standard deviations the square root of 2.
        (True, [x / (2**0.5 + 1e-4) for x in (-1, 1, 1, -1)]),
        (False, [-1.0, 1.0, 1.0, -1.0]),
    ],
)
def test_every_token_has_the_group_relative_advantage_of_its_response(std_norm: bool, worth: list[float]) -> None:
    experience = add_advantages(responses(), config(std_norm=std_norm))
    a, b, c, d = worth
    assert experience["advantage"].tolist() == pytest.approx([0, a, 0, b, b, 0, c, c, 0, d, d, d], abs=1e-5)
    assert experience["shaped_reward"].tolist() == [1.0, 4.0, 3.0, 2.0]
    assert "correction" not in experience


@pytest.mark.parametrize("std_norm", [True, False])
def test_equal_rewards_within_a_group_give_zero_advantages(std_norm: bool) -> None:
    equal = responses().with_sequences(reward=torch.tensor([0.1, 4.0, 0.1, 2.0]))
    experience = add_advantages(equal, config(std_norm=std_norm))
    assert experience["advantage"][[0, 1, 5, 6, 7]].tolist() == [0.0] * 5


def test_the_overlong_penalty_grows_with_the_tokens_in_the_buffer() -> None:
    # 4 - 3 = 1 token is free of penalty. Responses of 1, 2, 2 and 3 use 0, 1, 1 and 2 thirds of the buffer. The penalty
    # for all of it is 3.
    shaped = shaped_rewards(responses(), config(overlong_buffer=3, overlong_penalty=3.0))
    assert shaped.tolist() == pytest.approx([1.0, 3.0, 2.0, 0.0])


@pytest.mark.parametrize(
    ("correction", "weights"), [("tis", [1, 2, 2, 0.5, 2, 2, 1, 1]), ("icepop", [1, 0, 0, 0, 0, 0, 1, 1])]
)
def test_the_correction_reweights_tokens_by_the_ratio_of_trainer_and_engine(
    correction: Any, weights: list[float]
) -> None:
    # p / q of the tokens of the four responses: 1 | 4 4 | 1/4 4 | 8 1 1.
    gap_N = torch.tensor([1, 1, 1, 4, 4, 1, 0.25, 4, 1, 8, 1, 1]).log()
    batch = responses().with_tokens(logprob=gap_N - 9, rollout_logprob=torch.full((12,), -9.0))
    experience = add_advantages(batch, config(correction=correction, correction_range=(0.5, 2.0)))
    assert experience["correction"][batch["action_mask"]].tolist() == pytest.approx(weights, abs=1e-5)


class Fixed(torch.nn.Module):
    """A policy over four equally likely tokens, independent of the context."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_V = torch.nn.Parameter(torch.zeros(4))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        class Output:
            logits = self.logit_V.expand(*input_ids.shape, 4) * 1.0

        return Output


NOW = -math.log(4)
"""Log-probability of every token under the policy."""


def learnt_from(old: list[float]) -> Batch:
    """Return a response of two tokens with advantage 1, and one of one token with advantage -2, each after a prompt of
    one token. `old` has the three ratios of the policy to the old policy.
    """
    one, two, three = (NOW - math.log(ratio) for ratio in old)
    return Batch(
        [3, 2],
        {
            "tokens": torch.tensor([0, 1, 2, 0, 3]),
            "action_mask": torch.tensor([False, True, True, False, True]),
            "logprob": torch.tensor([0, one, two, 0, three]),
            "rollout_logprob": torch.full((5,), NOW - 0.5),
            "reference_logprob": torch.tensor([0.0, NOW, NOW - math.log(2), 0, NOW]),
            "advantage": torch.tensor([0.0, 1.0, 1.0, 0.0, -2.0]),
            "correction": torch.tensor([9.0, 2.0, 1.0, 9.0, 0.0]),
        },
    )


TOTALS = Totals(tokens=3, sequences=2)


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        # Ratios 1.5, 1.25, 0.5. The first is clipped to 1.2, the second to 1.2 or, with clip-higher 1.28, not at all,
        # the third to 0.8: -1.2, -1.2, 1.6 over three tokens, and with clip-higher -1.28, -1.25, 1.6.
        ({}, (-1.2 - 1.2 + 1.6) / 3),
        ({"clip_high": 0.28}, (-1.28 - 1.25 + 1.6) / 3),
        # Means over responses, their sums, and their sums over the maximum length of 4 tokens.
        ({"loss_aggregation": "seq-mean-token-mean"}, (-1.2 + 1.6) / 2),
        ({"loss_aggregation": "seq-mean-token-sum"}, (-2.4 + 1.6) / 2),
        ({"loss_aggregation": "seq-mean-token-sum-norm"}, (-2.4 + 1.6) / 2 / 4),
        # GSPO: both tokens of the first response have the ratio sqrt(1.5 * 1.25).
        ({"ratio": "sequence", "clip_high": 1.0}, (-2 * math.sqrt(1.875) + 1.6) / 3),
        # The first token has weight 2, the last one weight 0.
        ({"correction": "tis"}, (-2.4 - 1.2) / 3),
    ],
)
def test_the_loss_equals_a_calculation_by_hand(options: dict[str, Any], loss: float) -> None:
    output = policy_loss(Fixed(), learnt_from([1.5, 1.25, 0.5]), TOTALS, config(**options))
    assert float(output.loss) == pytest.approx(loss, abs=1e-5)
    assert float(output.metrics["entropy"]) == pytest.approx(math.log(4), abs=1e-5)
    assert float(output.metrics["engine_gap"]) == pytest.approx(0.5, abs=1e-5)


def test_the_kl_loss_is_added_to_the_surrogate_with_its_coefficient() -> None:
    output = policy_loss(Fixed(), learnt_from([1.0, 1.0, 1.0]), TOTALS, config(kl_coef=0.1))
    # d is 0, ln 2, 0. k3 is exp(-d) - 1 + d = ln 2 - 1/2 at the second token, and 0 elsewhere.
    kl = (math.log(2) - 0.5) / 3
    assert float(output.metrics["kl_loss"]) == pytest.approx(kl, abs=1e-6)
    assert float(output.loss) == pytest.approx(0.1 * kl, abs=1e-6)  # -1 - 1 + 2 is 0
    assert float(output.metrics["policy_loss"]) == pytest.approx(0.0, abs=1e-6)


def test_without_a_recomputed_logprob_the_current_policy_is_the_old_policy() -> None:
    batch, model = learnt_from([1.5, 1.25, 0.5]).without("logprob", "correction"), Fixed()
    output = policy_loss(model, batch, TOTALS, config())
    assert float(output.loss) == pytest.approx(0.0, abs=1e-6)
    assert float(output.metrics["ratio_mean"]) == pytest.approx(1.0, abs=1e-6)
    output.loss.backward()
    assert model.logit_V.grad is not None
    # d(-A log p) by logit v is -A (1[v] - 1/4): tokens 1 and 2 with A = 1, token 3 with A = -2, over 3 tokens.
    assert model.logit_V.grad.tolist() == pytest.approx([0, -1 / 3, -1 / 3, 2 / 3], abs=1e-6)


def minibatches(count: int, settings: GRPOConfig, step: int) -> list[torch.Tensor]:
    """As the policy's ranks divide a step."""
    parts = settings.optimizer_steps(count)
    return shuffled_minibatches(count, parts, settings.train.epochs, seed=settings.seed, step=step)


def test_each_epoch_uses_every_response_once_in_a_new_order() -> None:
    settings = config()
    settings.prompts_per_step, settings.samples_per_prompt = 4, 2
    settings.train = replace(settings.train, mini_batch_size=4, epochs=2)
    parts = [part.tolist() for part in minibatches(8, settings, step=1)]
    assert [len(part) for part in parts] == [4] * 4
    assert sorted(parts[0] + parts[1]) == sorted(parts[2] + parts[3]) == list(range(8))
    assert parts[:2] != parts[2:]
    assert parts == [part.tolist() for part in minibatches(8, settings, step=1)]
    assert parts != [part.tolist() for part in minibatches(8, settings, step=2)]
    # At the end of filtered data a step has fewer responses, and fewer optimizer steps of about four responses.
    assert [len(part) for part in minibatches(5, settings, step=1)] == [5, 5]
    assert [len(part) for part in minibatches(1, settings, step=1)] == [1, 1]
