"""recipes/openrlhf_ppo/algorithm.py: each estimator and penalty on the same four responses, calculated by hand."""

import math
from typing import Any, get_args

import pytest
import torch

from components.batch import Batch
from components.rl.aggregation import Totals
from recipes.openrlhf_ppo.algorithm import AdaptedKL, add_advantages, policy_loss, shaped_rewards
from recipes.openrlhf_ppo.config import AlgorithmOptions, PPOConfig
from training.options.data_options import DataOptions
from training.options.model_options import ModelOptions
from training.options.ppo_options import PolicyLoss
from training.options.rl_options import PolicyTrainOptions
from training.options.rollout_options import RolloutOptions
from training.roles.ppo_loss import mark_tokens
from training.roles.updates import over_updates


def config(**changes: Any) -> PPOConfig:
    """A configuration for two prompts with two responses each, without reference, with these algorithm options."""
    settings: dict[str, Any] = {"kl_coef": 0.0} | changes
    return PPOConfig(
        prompts_per_step=2,
        samples_per_prompt=2,
        model=ModelOptions(path="x"),
        data=DataOptions(path="task:sort"),
        rollout=RolloutOptions(max_new_tokens=8),
        train=PolicyTrainOptions(mini_batch_size=4),
        algorithm=AlgorithmOptions(**settings),
    )


def responses() -> Batch:
    """Prompts of one token and responses of 1, 2, 2 and 3 tokens. The responses of a group are not adjacent."""
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
        # group 7 has 1 and 3, group 5 has 4 and 2: means 2 and 3
        ("reinforce_baseline", [-1.0, 1.0, 1.0, -1.0]),
        ("dr_grpo", [-1.0, 1.0, 1.0, -1.0]),
        # minus the other response
        ("rloo", [-2.0, 2.0, 2.0, -2.0]),
        # both standard deviations are sqrt(2)
        ("grpo", [-(2**-0.5), 2**-0.5, 2**-0.5, -(2**-0.5)]),
        ("gae", [1.0, 4.0, 3.0, 2.0]),
        # minus the mean weighted by length: (1 * 1 + 2 * 3) / 3 and (2 * 4 + 3 * 2) / 5
        ("opo", [1 - 7 / 3, 1.2, 3 - 7 / 3, -0.8]),
        # all groups are informative
        ("gpg", [-1.0, 1.0, 1.0, -1.0]),
        # a lead of 2 over the other, divided by sqrt(2)
        ("grpo_passk", [0.0, 2**0.5, 2**0.5, 0.0]),
    ],
)
def test_responses_are_compared_within_the_group_of_their_prompt(estimator: str, shaped: list[float]) -> None:
    shaped_reward = shaped_rewards(responses(), config(estimator=estimator))
    assert shaped_reward.tolist() == pytest.approx(shaped, abs=1e-5)


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "dr_grpo"])
def test_without_a_discount_each_token_has_the_advantage_of_its_response(estimator: str) -> None:
    settings = config(estimator=estimator)
    experience = add_advantages(responses(), settings, 0.0)
    a, b, c, d = shaped_rewards(responses(), settings).tolist()
    assert experience["advantage"].tolist() == pytest.approx([0, a, 0, b, b, 0, c, c, 0, d, d, d], abs=1e-6)


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "reinforce_baseline"])
def test_whitened_advantages_have_mean_zero_and_variance_one(estimator: str) -> None:
    experience = add_advantages(responses(), config(estimator=estimator), 0.0)
    advantage_M = experience["advantage"][experience["action_mask"]]
    assert advantage_M.mean().item() == pytest.approx(0, abs=1e-6)
    assert advantage_M.square().mean().item() == pytest.approx(1, abs=1e-5)


def test_reinforce_without_std_norm_only_centres_the_discounted_returns() -> None:
    settings = config(estimator="reinforce", std_norm=False, gamma=0.5)
    experience = add_advantages(responses(), settings, 0.0)
    # Returns: 1 | 2 4 | 1.5 3 | 0.5 1 2 with mean 15 / 8.
    returns = [1, 2, 4, 1.5, 3, 0.5, 1, 2]
    mask_N = experience["action_mask"]
    assert experience["return"][mask_N].tolist() == pytest.approx(returns)
    assert experience["advantage"][mask_N].tolist() == pytest.approx([x - 15 / 8 for x in returns])


def test_the_overlong_penalty_grows_with_the_tokens_in_the_buffer() -> None:
    # 8 - 6 = 2 tokens are free of penalty. The last response has 3, one sixth of the buffer, and the penalty factor is
    # 3.
    shaped = shaped_rewards(responses(), config(overlong_buffer=6, overlong_penalty=3.0))
    assert shaped.tolist() == pytest.approx([1.0, 4.0, 3.0, 1.5])


@pytest.mark.parametrize(("coef", "last"), [(0.0, 0.0), (0.25, 0.5), (-1.0, -1.0)])
def test_only_truncated_responses_are_penalised(coef: float, last: float) -> None:
    shaped = shaped_rewards(responses(), config(truncated_factor=coef))
    assert shaped.tolist() == pytest.approx([1.0, 4.0, 3.0, last])


def test_rewards_are_clipped_to_their_range_after_the_baseline() -> None:
    settings = config(estimator="rloo", reward_range=(-1.5, 0.5))
    assert shaped_rewards(responses(), settings).tolist() == [-1.5, 0.5, 0.5, -1.5]


def test_equal_rewards_of_a_prompt_give_zero_advantages() -> None:
    equal = responses().with_sequences(reward=torch.tensor([0.1, 4.0, 0.1, 2.0]))
    experience = add_advantages(equal, config(estimator="grpo"), 0.0)
    assert experience["advantage"][:2].tolist() == [0.0, 0.0]
    assert experience["advantage"][5:8].tolist() == [0.0, 0.0, 0.0]


class Fixed(torch.nn.Module):
    """A policy over four tokens, independent of the context."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_V = torch.nn.Parameter(torch.tensor([0.3, -0.2, 0.5, 0.1]))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        class Output:
            logits = self.logit_V.expand(*input_ids.shape, 4) * 1.0

        return Output


def trained_on() -> Batch:
    """Five responses of two tokens to a prompt of one token. The old policy and the engine differ slightly from the
    policy.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, (15,), generator=generator)
    return Batch(
        [3] * 5,
        {
            "tokens": tokens,
            "action_mask": torch.tensor([False, True, True] * 5),
            "logprob": torch.randn(15, generator=generator) * 0.3 - 1.4,
            "rollout_logprob": torch.randn(15, generator=generator) * 0.3 - 1.4,
            "reference_logprob": torch.randn(15, generator=generator) * 0.3 - 1.4,
            "advantage": torch.randn(15, generator=generator),
            "correction": torch.rand(15, generator=generator) * 2,
        },
    )


@pytest.mark.parametrize("kind", get_args(PolicyLoss))
@pytest.mark.parametrize("aggregation", [None, "seq-mean-token-sum-norm"])
def test_the_size_of_micro_batches_changes_neither_loss_nor_gradient(kind: Any, aggregation: Any) -> None:
    settings = config(
        policy_loss=kind, loss_aggregation=aggregation, correction="tis", entropy_coef=0.1,
        kl_coef=0.2, kl_in_reward=False, kl_estimator="k3+",
    )  # fmt: skip
    step, totals = mark_tokens(trained_on(), 1, settings, step=3), Totals(tokens=10, sequences=5)

    def run(parts: list[list[int]]) -> tuple[float, torch.Tensor]:
        model = Fixed()
        losses = [policy_loss(model, step.select(part), totals, settings, kl_coef=0.2).loss for part in parts]
        sum(losses, torch.zeros(())).backward()
        assert model.logit_V.grad is not None
        return sum(loss.item() for loss in losses), model.logit_V.grad

    loss, gradient = run([[0, 1, 2, 3, 4]])
    cut_loss, cut_gradient = run([[3, 0], [4], [1, 2]])
    assert math.isfinite(loss)
    assert gradient.abs().sum() > 0
    assert cut_loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(cut_gradient, gradient, rtol=1e-4, atol=1e-6)


def test_the_correction_weights_each_token_and_gspo_starts_from_engine_logprobs() -> None:
    step, totals = trained_on(), Totals(tokens=10, sequences=5)

    def loss(batch: Batch, **changes: Any) -> float:
        return float(policy_loss(Fixed(), batch, totals, config(**changes), kl_coef=0.0).loss)

    doubled = step.with_tokens(correction=step["correction"] * 2)
    on = {"correction": "tis"}
    assert loss(doubled, **on) == pytest.approx(2 * loss(step, **on), rel=1e-5)
    assert loss(doubled) == loss(step)
    assert loss(doubled, policy_loss="gspo", **on) == loss(step, policy_loss="gspo", **on)
    swapped = step.with_tokens(logprob=step["rollout_logprob"])
    assert loss(step, policy_loss="gspo", **on) == loss(swapped, policy_loss="gspo")


# d is 1/2 at the only token of the first of four responses. k2 is 1/8 there.
@pytest.mark.parametrize(("estimator", "kl"), [("k1", 0.125), ("k2", 0.03125)])
def test_the_adaptive_kl_coefficient_in_the_reward_follows_the_mean_over_responses(estimator: str, kl: float) -> None:
    reference_N = torch.zeros(12)
    reference_N[1] = -0.5
    batch = responses().with_tokens(logprob=torch.zeros(12), reference_logprob=reference_N)
    # The KL is a tenth above the target, and four samples of a horizon of 100 have passed.
    control = AdaptedKL(config(kl_coef=1.0, kl_target=kl / 1.1, kl_horizon=100, kl_estimator=estimator))
    control.adapt(batch, {})
    assert control.coef == pytest.approx(1 + 0.1 * 4 / 100)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("cut", [[[0], [1]], [[1, 0]]])
def test_the_adaptive_kl_coefficient_in_the_loss_follows_the_mean_over_all_trained_tokens(
    epochs: int, cut: list[list[int]]
) -> None:
    settings = config(kl_coef=0.1, kl_target=0.28, kl_horizon=100, kl_in_reward=False, kl_estimator="k2")
    settings.train = PolicyTrainOptions(mini_batch_size=2, epochs=epochs)
    logprob_V = Fixed().logit_V.detach().log_softmax(-1)
    batch = responses()
    batch = batch.with_tokens(tokens=batch["tokens"] % 4, advantage=torch.zeros(12))
    # The first optimizer step has 3 tokens with d = 0, the second one 5 tokens with d = 1, where k2 is 1/2.
    d_N = torch.tensor([0.0] * 5 + [1.0] * 7)
    batch = batch.with_tokens(reference_logprob=logprob_V[batch["tokens"]] - d_N)

    def update(rows: list[int], tokens: int) -> dict[str, float]:
        step, totals = batch.select(rows), Totals(tokens=tokens, sequences=2)
        parts = [policy_loss(Fixed(), step.select(part), totals, settings, 0.1).metrics for part in cut]
        return {name: sum(float(part[name]) for part in parts) for name in parts[0]}

    metrics = over_updates([update([0, 1], 3), update([2, 3], 5)] * epochs)
    assert metrics["kl_loss"] == pytest.approx(0.25)
    control = AdaptedKL(settings)
    logged = {f"actor/{name}": value for name, value in metrics.items()}
    control.adapt(batch, logged)
    assert "actor/kl_sum" not in logged
    # 2.5 nats over 8 tokens are above the target. The mean over the two steps, 0.25, would be below it.
    assert control.coef == pytest.approx(0.1 * (1 + (0.3125 / 0.28 - 1) * 4 / 100))


def test_a_kl_in_the_loss_leaves_the_reward_unchanged() -> None:
    batch = responses().with_tokens(logprob=torch.zeros(12), reference_logprob=torch.ones(12))
    common = {"estimator": "reinforce", "kl_coef": 0.5, "std_norm": False}
    apart = add_advantages(batch, config(**common, kl_in_reward=False, kl_estimator="k2"), 0.5)
    within = add_advantages(batch, config(**common), 0.25)
    # d = -1 at each token, so a coefficient of 1/4 adds 1/4 per remaining token: 2 at the second token of response 2.
    assert apart["return"][:5].tolist() == [0.0, 1.0, 0.0, 4.0, 4.0]
    assert within["return"][:5].tolist() == [0.0, 1.25, 0.0, 4.5, 4.25]
