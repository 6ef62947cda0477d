"""recipes/verl_ppo: estimators and losses on the same responses, calculated by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from components.batch import Batch
from components.rl.aggregation import Totals
from recipes.verl_ppo.algorithm import AdaptedKL, add_advantages, compared, minibatches, policy_loss, surrogate
from recipes.verl_ppo.config import VerlPPOConfig
from recipes.verl_ppo.main import read_config
from tests.messages import says
from training.options.schema import ConfigError

OWN = ["actor_rollout_ref.model.path=x", "data.train_files=task:sort", "actor_rollout_ref.actor.use_dynamic_bsz=true"]
SIZES = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=3"]


def config(*options: str) -> VerlPPOConfig:
    return read_config([*OWN, *SIZES, *options])


def responses(**columns: torch.Tensor) -> Batch:
    """Three responses of two tokens to prompt 7 with rewards 4, 1 and 4, and one to prompt 2 with reward 5. A prompt is
    one token. At the first response's last token the policy exceeds the reference by half a nat.
    """
    mask_N = torch.tensor([False, True, True] * 4)
    reference_N = torch.full((12,), -1.0)
    reference_N[2] = -1.5
    per_token = {
        "tokens": torch.arange(12),
        "action_mask": mask_N,
        "logprob": torch.full((12,), -1.0),
        "rollout_logprob": torch.tensor([-1.0, -1.0 - math.log(4), *[-1.0] * 9, -1.0 + math.log(4)]),
        "reference_logprob": reference_N,
        "value": torch.tensor([9.0, 3.0, 3.0] * 4),
    }
    per_sequence = {"reward": torch.tensor([4.0, 1.0, 4.0, 5.0]), "prompt_id": torch.tensor([7, 7, 7, 2])}
    return Batch([3] * 4, per_token, per_sequence | columns)


def advantages(*options: str, **columns: torch.Tensor) -> list[float]:
    """Return the advantage of each response. Its two tokens have equal advantages."""
    learned = add_advantages(responses(**columns), config(*options), 0.1)
    advantage_BT = learned["advantage"].reshape(4, 3)
    assert advantage_BT[:, 0].tolist() == [0.0] * 4
    assert advantage_BT[:, 1].tolist() == advantage_BT[:, 2].tolist()
    return advantage_BT[:, 1].tolist()


ROOT3 = math.sqrt(3)
UNBIASED = math.sqrt(7 / 8)
"""Ratio of the biased to the unbiased standard deviation of eight tokens."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Divided by the standard deviation, whose square is (1 + 4 + 1) / 2.
        ("algorithm.adv_estimator=grpo", [1 / ROOT3, -2 / ROOT3, 1 / ROOT3, 0]),
        ("algorithm.adv_estimator=grpo_vectorized", [1 / ROOT3, -2 / ROOT3, 1 / ROOT3, 0]),
        ("algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False", [1, -2, 1, 0]),
        # Minus the means of the others: 5/2, 4, 5/2.
        ("algorithm.adv_estimator=rloo", [1.5, -3, 1.5, 0]),
        # Two responses are equally good, so none has a lead.
        ("algorithm.adv_estimator=grpo_passk", [0, 0, 0, 0]),
        # Multiplied by 4 responses over the 3 in the informative group, and halved.
        ("algorithm.adv_estimator=gpg algorithm.f_norm=2", [2 / 3, -4 / 3, 2 / 3, 0]),
        # All have equal length, so the baseline is the mean.
        ("algorithm.adv_estimator=opo", [1, -2, 1, 0]),
        # 1, -2, 1, 0: the mean is 0, the mean square 6/4.
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline", [UNBIASED / 1.5**0.5 * x for x in (1, -2, 1, 0)]),
        # 4, 1, 4, 5: mean 3.5. The squared deviations .25, 6.25, .25, 2.25 have mean 2.25.
        ("algorithm.adv_estimator=reinforce_plus_plus", [UNBIASED / 3 * x for x in (1, -5, 1, 3)]),
        # Returns minus values are 1, -2, 1, 2 with mean .5: squared deviations .25, 6.25, .25, 2.25 again.
        ("algorithm.adv_estimator=gae", [UNBIASED / 3 * x for x in (1, -5, 1, 3)]),
    ],
)
def test_each_estimator_equals_a_calculation_by_hand(options: str, expected: list[float]) -> None:
    assert advantages(*options.split()) == pytest.approx(expected, abs=1e-5)


def test_rounding_noise_in_equal_rewards_gives_tiny_advantages() -> None:
    # 1, 1 - d, 1: the deviations from the mean are d / 3, -2 d / 3 and d / 3, and the standard deviation is d /
    # sqrt(3), to which 1e-6 is added.
    d = 2.0**-23
    group_advantages = advantages("algorithm.adv_estimator=grpo", reward=torch.tensor([1.0, 1.0 - d, 1.0, 5.0]))
    unit = d / 3 / (d / ROOT3 + 1e-6)
    assert group_advantages == pytest.approx([unit, -2 * unit, unit, 0], rel=1e-3)
    assert unit < 0.04


def test_remax_advantages_subtract_the_reward_of_the_greedy_response() -> None:
    greedy = torch.tensor([1.0, 1.0, 1.0, 5.0])
    assert advantages("algorithm.adv_estimator=remax", greedy_reward=greedy) == pytest.approx([3, 0, 3, 0])


def test_distillation_gives_each_token_the_teachers_log_probability_minus_the_policys() -> None:
    options = ["algorithm.estimator=distillation", "algorithm.reference_path=teacher"]
    batch = responses()
    # The teacher is lower by half a nat at the third token. An advantage is limited to 10 nats.
    batch = batch.with_tokens(reference_logprob=batch["reference_logprob"].index_fill(0, torch.tensor([4]), -15.0))
    learned = add_advantages(batch, config(*options), 0.1)
    assert learned["advantage"].tolist() == pytest.approx([0, 0, -0.5, 0, -10, *[0] * 7])
    with pytest.raises(ConfigError, match=says("distillation", "teacher", "ref.model.path")):
        config(options[0])


def test_gdpo_normalises_each_reward_separately() -> None:
    # 1, 0, 1 and 0, 0, 3 within prompt 7, divided by deviations of sqrt(1/3) and sqrt(3): 1/3, -2/3, 1/3 and -1, -1, 2.
    logs = {"log_a": torch.tensor([1.0, 0.0, 1.0, 7.0]), "log_b": torch.tensor([0.0, 0.0, 3.0, 7.0])}
    total = [ROOT3 / 3 - 1 / ROOT3, -2 * ROOT3 / 3 - 1 / ROOT3, ROOT3 / 3 + 2 / ROOT3, 0.0]
    deviation = math.sqrt(sum(x * x for x in total) / 4)
    actual = advantages("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,b]", **logs)
    assert actual == pytest.approx([x / deviation for x in total], abs=1e-4)
    with pytest.raises(ValueError, match=says("gdpo_rewards", " c,", "a, b")):
        advantages("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,c]", **logs)


def test_the_kl_is_subtracted_before_rewards_are_compared() -> None:
    options = ["algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=False"]
    # A tenth of half a nat: 3.95, 1, 4, minus their mean 8.95 / 3.
    expected = [3.95 - 8.95 / 3, 1 - 8.95 / 3, 4 - 8.95 / 3, 0]
    assert advantages(*options, "algorithm.use_kl_in_reward=True") == pytest.approx(expected, abs=1e-5)
    assert add_advantages(responses(), config(*options, "algorithm.use_kl_in_reward=True"), 0.1)[
        "shaped_reward"
    ].tolist() == pytest.approx([3.95, 1, 4, 5])


def test_the_kl_coefficient_adapts_to_its_target() -> None:
    adaptive = "algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.05 algorithm.kl_ctrl.horizon=100"
    control = AdaptedKL(config("algorithm.use_kl_in_reward=True", *adaptive.split()))
    # Half a nat over two tokens in one of four responses is 1/16, a quarter above the target. It is clipped to a fifth.
    metrics = control.adapt(responses())
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.0625)
    assert control.coef == pytest.approx(0.001 * (1 + 0.2 * 4 / 100))
    assert AdaptedKL(config()).adapt(responses()) == {}


def test_kl_estimators_have_the_names_of_verl() -> None:
    names = ["kl", "k1", "abs", "mse", "low_var_kl", "low_var_kl+", "k3+"]
    algorithms = [config("algorithm.use_kl_in_reward=True", f"algorithm.kl_penalty={name}").algorithm for name in names]
    assert [algorithm.kl_estimator for algorithm in algorithms] == ["k1", "k1", "abs", "k2", "k3", "k3+", "k3+"]
    in_loss = [f"actor_rollout_ref.actor.{option}" for option in ("use_kl_loss=True", "kl_loss_type=mse")]
    assert config(*in_loss).kl_in_loss == (0.001, "k2")


@pytest.mark.parametrize(
    ("options", "weights", "kept"),
    [
        # The first response's first token is now 4 times as likely, the last response's last token a quarter as likely.
        ("rollout_is=token", [2, 1, 1, 1, 1, 1, 1, 0.25], 8),
        ("rollout_is=token rollout_is_threshold=0.5_2.0", [0, 1, 1, 1, 1, 1, 1, 0], 8),
        ("rollout_is=sequence", [2, 2, 1, 1, 1, 1, 0.25, 0.25], 8),
        ("rollout_is=token rollout_is_batch_normalize=True", [x / (8.25 / 8) for x in (2, 1, 1, 1, 1, 1, 1, 0.25)], 8),
        # Sequences have weights of 2, 1, 1 and 1/4; the geometric means are 2, 1, 1 and 1/2.
        (
            "rollout_is=sequence rollout_is_batch_normalize=True rollout_rs=seq_mean_k1 rollout_rs_threshold=1.5",
            [x / (4.25 / 4) for x in (2, 2, 1, 1, 1, 1, 0.25, 0.25)],
            4,
        ),
        ("rollout_rs=token_k1 rollout_rs_threshold=2.0", None, 6),
        # The means over the responses are the roots, 2 and 1/2.
        ("rollout_rs=seq_mean_k1 rollout_rs_threshold=3.0", None, 8),
        ("rollout_rs=seq_mean_k1 rollout_rs_threshold=1.5", None, 4),
        ("rollout_rs=token_k1,seq_sum_k2 rollout_rs_threshold=9.0,0.5", None, 4),
        # Half the square of log 4 is .96, at one token in each of two responses.
        ("rollout_rs=seq_max_k2 rollout_rs_threshold=0.9", None, 4),
        ("rollout_rs=seq_max_k2 rollout_rs_threshold=1.0", None, 8),
    ],
)
def test_the_rollout_correction_weights_or_rejects_tokens(options: str, weights: list[float] | None, kept: int) -> None:
    options_N = [f"algorithm.rollout_correction.{option}" for option in options.split()]
    learned = add_advantages(responses(), config("algorithm.adv_estimator=grpo", *options_N), 0.0)
    assert int(learned["action_mask"].sum()) == kept
    if weights is not None:
        assert learned["correction"][responses()["action_mask"]].tolist() == pytest.approx(weights, abs=1e-5)


def test_an_excluded_response_still_counts_in_its_group() -> None:
    arguments = ["algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=False"]
    rule = ["rollout_rs=seq_mean_k1", "rollout_rs_threshold=1.5"]
    learned = add_advantages(
        responses(), config(*arguments, *(f"algorithm.rollout_correction.{option}" for option in rule)), 0.0
    )
    assert learned["shaped_reward"].tolist() == [4, 1, 4, 5]
    # The first response is excluded. The mean over the three is still 3.
    assert learned["advantage"].reshape(4, 3)[:, 1].tolist() == pytest.approx([0, -2, 1, 0])
    assert learned["sampled_mask"].sum() == 8


def test_means_of_sequence_weights_are_over_sequences_regardless_of_length() -> None:
    # The first response has one token, which is 4 times as likely. Truncated at 2 the weights are 2, 1, 1 and 1/4.
    batch = responses().with_tokens(action_mask=torch.tensor([False, True, False] + [False, True, True] * 3))
    arguments = [
        f"algorithm.rollout_correction.{x}" for x in ("rollout_is=sequence", "rollout_is_batch_normalize=True")
    ]
    learned = add_advantages(batch, config("algorithm.adv_estimator=grpo", *arguments), 0.0)
    weights = [x / (4.25 / 4) for x in (2, 1, 1, 1, 1, 0.25, 0.25)]
    assert learned["correction"][batch["action_mask"]].tolist() == pytest.approx(weights, abs=1e-5)


def test_returns_exclude_rewards_of_rejected_tokens_unless_estimate_rejected_is_set() -> None:
    # The last response's last token has its reward of 5 and is a quarter as likely. The first response's first token is
    # rejected.
    rule = ["algorithm.rollout_correction.rollout_rs=token_k1", "algorithm.rollout_correction.rollout_rs_threshold=2.0"]
    arguments = ["algorithm.adv_estimator=remax", *rule]
    columns = responses(greedy_reward=torch.ones(4))
    first = add_advantages(columns, config(*arguments), 0.0)["advantage"].reshape(4, 3)
    assert first[:, 1:].tolist() == [[0, 3], [0, 0], [3, 3], [-1, 0]]
    after = add_advantages(columns, config(*arguments, "algorithm.estimate_rejected=true"), 0.0)["advantage"].reshape(
        4, 3
    )
    assert after[:, 1:].tolist() == [[0, 3], [0, 0], [3, 3], [4, 0]]


def test_a_rejected_response_counts_in_the_mean_over_responses() -> None:
    mask_N = torch.tensor([False, True, True, False, False, False])
    columns = {"action_mask": mask_N, "rollout_logprob": torch.zeros(6), "advantage": torch.ones(6)}
    micro = Batch([3, 3], {"tokens": torch.zeros(6, dtype=torch.int64), **columns, "logprob": torch.full((6,), -1.0)})
    loaded = config("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "algorithm.adv_estimator=grpo")
    totals = Totals(tokens=2, sequences=1, rows=2)
    # Four equally likely tokens, and an old probability of e^-1: the ratio is e/4 = 0.68, so a token's loss is -e/4.
    loss = policy_loss(Even(), micro, totals, loaded).metrics["policy_loss"]
    assert float(loss) == pytest.approx(-math.e / 4 / 2, abs=1e-6)


def test_the_learning_rate_changes_per_training_step_and_starts_at_0() -> None:
    optim = "actor_rollout_ref.actor.optim"
    loaded = config(f"{optim}.lr=1.0", f"{optim}.lr_warmup_steps_ratio=0.5")  # 8 prompts in mini-batches of 4
    assert loaded.updates_per_step == 2
    engine = loaded.train_engine(5)
    # The rate rises over int(0.5 * 5) = 2 of 5 training steps, which have two optimizer steps each.
    assert [engine.learning_rate_at(step) for step in range(8)] == [0, 0, 0.5, 0.5, 1, 1, 1, 1]
    assert (engine.weight_decay, engine.weight_decay_all) == (0.01, True)
    assert config(f"{optim}.lr_warmup_steps=3").train_engine(5).learning_rate_at(4) == pytest.approx(1e-6 * 2 / 3)


def test_a_branch_has_the_advantage_of_its_main_sequence() -> None:
    # The second is a branch of the first: 4 and 4 are one sample, which is compared only with the third one.
    columns = {"branch": torch.tensor([0, 1, 0, 0]), "reward": torch.tensor([4.0, 4.0, 2.0, 5.0])}
    logs = {"log_a": torch.tensor([1.0, 1.0, 0.0, 7.0])}
    assert advantages("algorithm.adv_estimator=opo", **columns) == pytest.approx([1, 1, -1, 0])
    # 1 and 0 divided by a deviation of sqrt(1/2), and 0: whitened over the three samples.
    actual = advantages("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a]", **columns, **logs)
    assert actual == pytest.approx([1.5**0.5, 1.5**0.5, -(1.5**0.5), 0], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # The ratios are 1.5 with advantage 1 and 4 with advantage -1.
        ("actor.clip_ratio=0.2", [-1.2, 3.0]),
        ("actor.clip_ratio_high=0.28 actor.clip_ratio_c=5.0", [-1.28, 4.0]),
        ("actor.policy_loss.loss_mode=gpg", [1.0, -1.0]),
        ("actor.policy_loss.loss_mode=cispo", [1.2, -1.2]),
        # The negative product of the ratio (at most 3, or 20 by default), the advantage, and the log-probability of -1.
        ("actor.policy_loss.loss_mode=dppo_tv actor.clip_ratio=1.0", [1.5, -3.0]),
        ("actor.policy_loss.loss_mode=dppo_kl actor.clip_ratio=9.0 actor.clip_ratio_c=2.0", [1.5, -2.0]),
        ("actor.policy_loss.loss_mode=dppo_kl actor.clip_ratio=9.0 actor.clip_ratio_c=30.0", [1.5, -4.0]),
        # 4 / tau times the sigmoid of tau (r - 1).
        (
            "actor.policy_loss.loss_mode=sapo actor.tau_pos=2.0 actor.tau_neg=1.0",
            [-2 / (1 + math.exp(-1)), 4 / (1 + math.exp(-3))],
        ),
    ],
)
def test_each_surrogate_equals_a_calculation_by_hand(options: str, expected: list[float]) -> None:
    arguments = [f"actor_rollout_ref.{option}" for option in options.split()]
    logprob_N = torch.tensor([-1.0, -1.0])
    old_N = logprob_N - torch.tensor([1.5, 4.0]).log()
    columns = {"logprob": old_N, "advantage": torch.tensor([1.0, -1.0]), "action_mask": torch.tensor([True, True])}
    micro = Batch([1, 1], {"tokens": torch.arange(2), "rollout_logprob": logprob_N, **columns})
    assert surrogate(logprob_N, micro, config(*arguments)).loss_N.tolist() == pytest.approx(expected, abs=1e-5)
    # In bypass mode the ratio is taken to the engine's policy, which is equal here.
    bypass = config(*arguments, "algorithm.rollout_correction.bypass_mode=True")
    if "clip_ratio" in options and "dppo" not in options:
        assert surrogate(logprob_N, micro, bypass).loss_N.tolist() == pytest.approx([-1.0, 1.0])


class Even(torch.nn.Module):
    """Four equally likely tokens: log 1/4 each."""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 4))


def test_with_engine_log_probs_as_old_ones_the_loss_logs_the_mismatch() -> None:
    mask_N = torch.tensor([False, True, True])
    engine_N = math.log(1 / 4) + torch.tensor([9.0, 0.5, -0.25])
    micro = Batch([3], {"tokens": torch.arange(3), "action_mask": mask_N, "rollout_logprob": engine_N})
    micro = micro.with_tokens(advantage=torch.ones(3), logprob=torch.full((3,), math.log(1 / 4)))
    bypass, totals = "algorithm.rollout_correction.bypass_mode=True", Totals(tokens=2, sequences=1)
    metrics = policy_loss(Even(), micro, totals, config(bypass)).metrics
    assert float(metrics["engine_gap"]) == pytest.approx(0.375, abs=1e-5)
    assert "engine_gap" not in policy_loss(Even(), micro, totals, config()).metrics


def test_with_engine_log_probs_as_old_ones_each_pass_is_compared_with_them() -> None:
    mask_N = torch.tensor([False, True, True])
    # The first token is twice as likely under the policy as under the engine, the other one four times.
    engine_N = math.log(1 / 4) - torch.tensor([9.0, math.log(2), math.log(4)])
    micro = Batch([3], {"tokens": torch.arange(3), "action_mask": mask_N, "rollout_logprob": engine_N})
    micro = micro.with_tokens(advantage=torch.tensor([0.0, 1.0, 10.0]))
    prefix = "algorithm.rollout_correction."
    arguments = [f"{prefix}bypass_mode=True", f"{prefix}rollout_is=token", f"{prefix}rollout_is_threshold=3.0"]
    totals = Totals(tokens=2, sequences=1)

    def loss(*options: str) -> float:
        return float(policy_loss(Even(), micro, totals, config(*arguments, *options)).metrics["policy_loss"])

    # Weights 2 and 3, limited, times log 4 each. PPO uses its own ratio, at most 1.2.
    assert loss(f"{prefix}loss_type=reinforce") == pytest.approx(math.log(4) * (2 * 1 + 3 * 10) / 2)
    assert loss() == pytest.approx(-1.2 * (1 + 10) / 2)
    # The second token is excluded from the loss but stays in the token count.
    assert loss(f"{prefix}rollout_rs=token_k1", f"{prefix}rollout_rs_threshold=3.0") == pytest.approx(-1.2 / 2)


def test_sequence_losses_are_means_over_responses_and_the_kl_has_its_own_aggregation() -> None:
    # Responses of one token and of three, with advantages 1 and 5, and a KL of log 4 per token of the second one.
    mask_N = torch.tensor([False, True, False, True, True, True])
    even_N = torch.full((6,), math.log(1 / 4))
    micro = Batch([2, 4], {"tokens": torch.arange(6) % 4, "action_mask": mask_N, "logprob": even_N})
    reference_N = torch.tensor([0.0, even_N[1], 0.0, 0.0, 0.0, 0.0])
    micro = micro.with_tokens(advantage=torch.tensor([0.0, 1.0, 0.0, 5.0, 5.0, 5.0]), reference_logprob=reference_N)
    actor = "actor_rollout_ref.actor"
    kl = [f"{actor}.use_kl_loss=true", f"{actor}.kl_loss_coef=0.5", f"{actor}.kl_loss_type=abs"]
    for loss_mode, mean in (("vanilla", -(1 + 3 * 5) / 4), ("gspo", -(1 + 5) / 2)):
        loaded = config(f"{actor}.policy_loss.loss_mode={loss_mode}", *kl)
        metrics = policy_loss(Even(), micro, Totals(tokens=4, sequences=2, rows=2), loaded).metrics
        assert float(metrics["policy_loss"]) == pytest.approx(mean)
        assert float(metrics["kl_loss"]) == pytest.approx(math.log(4) * 3 / 4)


def test_the_advantage_of_a_single_response_is_its_reward() -> None:
    for estimator in ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline"):
        loaded = config(f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n=1")
        actual = compared(responses(), torch.tensor([4.0, 1.0, 4.0, 5.0]), loaded)
        assert actual.tolist() == [4.0, 1.0, 4.0, 5.0]


def test_mini_batches_count_prompts_and_keep_their_order_unless_shuffled() -> None:
    responses = Batch([1] * 24, {"action_mask": torch.ones(24, dtype=torch.bool)})
    order = minibatches(responses, config("actor_rollout_ref.actor.ppo_epochs=2"), "actor", 3)
    assert [chosen.tolist() for chosen in order] == [list(range(12)), list(range(12, 24))] * 2
    shuffled = minibatches(responses, config("actor_rollout_ref.actor.shuffle=True"), "actor", 3)
    assert [len(chosen) for chosen in shuffled] == [12, 12]
    assert sorted(torch.cat(shuffled).tolist()) == list(range(24)) != torch.cat(shuffled).tolist()


def test_actor_and_critic_resample_the_same_responses_by_reward() -> None:
    reward_B = torch.tensor([1.0, -2.0, *[0.5] * 22])
    responses = Batch([1] * 24, {"action_mask": torch.ones(24, dtype=torch.bool)}, {"reward": reward_B})
    extremes = config("algorithm.use_pf_ppo=True", "algorithm.pf_ppo.reweight_method=max_min")
    drawn = {part: torch.cat(minibatches(responses, extremes, part, 3)).tolist() for part in ("actor", "critic")}
    assert drawn["actor"] == drawn["critic"] and len(drawn["actor"]) == 24
    assert set(drawn["actor"]) == {0, 1}
    assert torch.cat(minibatches(responses, extremes, "actor", 4)).tolist() != drawn["actor"]


def test_pf_ppo_is_off_by_default_and_uses_the_rule_of_verl() -> None:
    assert config("algorithm.pf_ppo.reweight_method=max_min").algorithm.resample is None
    algorithm = config("algorithm.use_pf_ppo=True", "algorithm.pf_ppo={weight_pow: 3.0}").algorithm
    assert (algorithm.resample, algorithm.resample_power) == ("pow", 3.0)
    with pytest.raises(ValueError, match=says("algorithm.pf_ppo.reweight_method", "best", "max_min")):
        config("algorithm.use_pf_ppo=True", "algorithm.pf_ppo.reweight_method=best")
