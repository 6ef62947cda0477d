"""Metrics of a step of the verl recipe, calculated by hand. B sequences, N tokens."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from components.batch import Batch
from recipes.verl_ppo.metrics import balanced, experience_metrics, heldout_metrics, performance, renamed


def config(rollout_is: str | None = None) -> Any:
    kind = "none" if rollout_is is None else "tis"
    algorithm = SimpleNamespace(correction=kind, correction_level=rollout_is, correction_range=(0.0, 1.5))
    return SimpleNamespace(data=SimpleNamespace(max_prompt_tokens=2), algorithm=algorithm)


def experience() -> Batch:
    """Three responses of 2, 1 and 0 tokens to prompts of 1, 2 and 1 tokens. The first token is half as likely under the
    policy as under the engine, the last one twice as likely. Masked values must not be used.
    """
    half, nan = math.log(0.5), math.nan
    return Batch(
        [3, 3, 1],
        {
            "tokens": torch.arange(7),
            "action_mask": torch.tensor([False, True, True, False, False, True, False]),
            "logprob": torch.tensor([nan, 2 * half, half, nan, nan, half, nan]),
            "rollout_logprob": torch.tensor([nan, half, half, nan, nan, 2 * half, nan]),
            "advantage": torch.tensor([nan, 1.0, 0.0, nan, nan, -4.0, nan]),
            "return": torch.tensor([nan, 2.0, 4.0, nan, nan, 6.0, nan]),
            "value": torch.tensor([nan, 1.0, 3.0, nan, nan, 2.0, nan]),
        },
        {
            "reward": torch.tensor([1.0, 0.5, -9.0]),
            "score": torch.tensor([1.0, 0.0, 0.0]),
            "shaped_reward": torch.tensor([0.75, 0.25, -9.0]),
            "truncated": torch.tensor([False, True, False]),
            "prompt_id": torch.tensor([0, 1, 2]),
            "prompt_length": torch.tensor([1, 2, 1]),
            "log_format": torch.tensor([1.0, 0.0, 0.5]),
        },
    )


def test_metrics_of_rewards_and_values_exclude_empty_responses() -> None:
    metrics = experience_metrics(experience(), config(), experience().select([2]))
    expected = {
        "critic/score": (0.75, 1.0, 0.5),
        "critic/rewards": (0.5, 0.75, 0.25),
        "critic/advantages": (-1.0, 1.0, -4.0),
        "critic/returns": (4.0, 6.0, 2.0),
        "critic/values": (2.0, 3.0, 1.0),
    }
    for name, numbers in expected.items():
        assert tuple(metrics[f"{name}/{kind}"] for kind in ("mean", "max", "min")) == numbers
    # Returns minus values are 1, 1 and 4 with variance 2. The variance of the returns is 8 / 3.
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - 2 / (8 / 3), abs=1e-5)
    # A metric without a name in verl keeps its own.
    names = ("reward/failed", "reward/score", "reward/format", "rollout/truncated_share")
    assert [metrics[name] for name in names] == pytest.approx([1.0, 1 / 3, 0.5, 1 / 3])
    assert not {"reward/reward", "reward/shaped", "rollout/response_length", "rollout/mismatch_kl"} & set(metrics)


def test_length_metrics_equal_a_calculation_by_hand() -> None:
    metrics = experience_metrics(experience(), config())
    lengths = {name: value for name, value in metrics.items() if "_length" in name or "aborted" in name}
    assert lengths == pytest.approx(
        {
            "response_length/mean": 1.0,
            "response_length/max": 2.0,
            "response_length/min": 0.0,
            "response_length/clip_ratio": 1 / 3,
            "response_length_non_aborted/mean": 1.5,
            "response_length_non_aborted/max": 2.0,
            "response_length_non_aborted/min": 1.0,
            "response_length_non_aborted/clip_ratio": 0.5,
            "response/aborted_ratio": 1 / 3,
            "prompt_length/mean": 4 / 3,
            "prompt_length/max": 2.0,
            "prompt_length/min": 1.0,
            "prompt_length/clip_ratio": 1 / 3,
        }
    )


def test_the_comparison_of_trainer_and_engine_equals_a_calculation_by_hand() -> None:
    metrics = experience_metrics(experience(), config())
    # Probabilities 1/4, 1/2, 1/2 and 1/2, 1/2, 1/4: the differences are 1/4, 0, 1/4. Minus their mean 5/12, in
    # twelfths, the probabilities are -2, 1, 1 and 1, 1, -2: correlation -3 / 6.
    compared = {name: value for name, value in metrics.items() if name.startswith("training/")}
    assert compared == pytest.approx(
        {
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_max": 0.25,
            "training/rollout_probs_diff_mean": 1 / 6,
            "training/rollout_probs_diff_std": math.sqrt(2) / 12,
            "training/rollout_actor_probs_pearson_corr": -0.5,
        },
        abs=1e-6,
    )
    # In units of log 2: the trainer has 2 and 1 (mean 1.5) and 1, the engine has 1 and 1 (mean 1) and 2. Per response
    # 0.5 and -1. Per token log p - log q is -1, 0, 1, and p / q is 1/2, 1, 2.
    log_2 = math.log(2)
    expected = {
        "training_log_ppl": 1.25 * log_2,
        "rollout_log_ppl": 1.5 * log_2,
        "training_ppl": (2**1.5 + 2) / 2,
        "rollout_ppl": (2 + 4) / 2,
        "log_ppl_diff": -0.25 * log_2,
        "log_ppl_abs_diff": 0.75 * log_2,
        "log_ppl_diff_max": 0.5 * log_2,
        "log_ppl_diff_min": -log_2,
        "ppl_ratio": (2**0.5 + 0.5) / 2,
        "kl": 0.0,
        "k3_kl": (0.5 + 1 + 2) / 3 - 1,
        "chi2_token": (0.25 + 1 + 4) / 3 - 1,
        "chi2_seq": (0.25 + 4) / 2 - 1,
    }
    corrected = {name: value for name, value in metrics.items() if name.startswith("rollout_corr/")}
    assert corrected == pytest.approx({f"rollout_corr/{name}": value for name, value in expected.items()}, abs=1e-6)


def test_without_trainer_logprobs_there_are_no_comparison_metrics() -> None:
    metrics = experience_metrics(experience().without("logprob", "value"), config())
    assert not any(name.startswith(("training/", "rollout_corr/", "critic/v")) for name in metrics)


def test_metrics_of_weights_and_rejections_cover_all_sampled_tokens() -> None:
    sampled_N = experience()["action_mask"]
    # The last token is rejected. The weights are p / q, truncated at 1.5: 0.5, 1 and 1.5. One of three is outside of
    # the bounds.
    batch = experience().with_tokens(
        sampled_mask=sampled_N,
        action_mask=sampled_N & (torch.arange(7) < 5),
        correction=torch.tensor([0.0, 0.5, 1.0, 0.0, 0.0, 1.5, 0.0]),
    )
    metrics = experience_metrics(batch, config(rollout_is="token"))
    weights = {name: value for name, value in metrics.items() if "rollout_is_" in name or "rollout_rs_" in name}
    expected = {
        "rollout_is_mean": 1.0,
        "rollout_is_max": 1.5,
        "rollout_is_min": 0.5,
        "rollout_is_std": math.sqrt(0.5 / 3),
        "rollout_is_eff_sample_size": 3 / 3.5,
        "rollout_is_oob_ratio": 1 / 3,
        "rollout_rs_masked_fraction": 1 / 3,
    }
    assert weights == pytest.approx({f"rollout_corr/{name}": value for name, value in expected.items()})
    assert metrics["critic/advantages/mean"] == 0.5
    assert metrics["rollout_corr/kl"] == pytest.approx(0.0, abs=1e-6)


def test_episodes_have_metrics_of_turns_and_weight_staleness() -> None:
    batch = experience().with_sequences(
        num_turns=torch.tensor([1, 3, 2]), staleness=torch.tensor([0, 1, 2]), weight_version=torch.tensor([2, 1, 0])
    )
    metrics = experience_metrics(batch.with_objects(status=["finished", "truncated", "aborted"]), config())
    assert [metrics[f"num_turns/{kind}"] for kind in ("mean", "max", "min")] == [2.0, 3.0, 1.0]
    assert (metrics["rollout/staleness_mean"], metrics["rollout/aborted_share"]) == (1.0, pytest.approx(1 / 3))
    assert "rollout/turns_mean" not in metrics


def test_update_metrics_have_the_names_of_verl() -> None:
    actor = ("loss", "policy_loss", "clip_frac", "dual_clip_frac", "approx_kl", "entropy", "kl_loss")
    metrics = renamed({f"actor/{name}": 1.0 for name in (*actor, "grad_norm", "learning_rate", "first_ratio_mean")})
    names = "loss pg_loss pg_clipfrac pg_clipfrac_lower ppo_kl entropy kl_loss grad_norm lr first_ratio_mean"
    assert list(metrics) == [f"actor/{name}" for name in names.split()]
    critic = ("loss", "clip_frac", "value_mean", "return_mean", "grad_norm", "learning_rate")
    metrics = renamed({f"critic/{name}": 1.0 for name in critic})
    names = "vf_loss vf_clipfrac vpred_mean return_mean grad_norm lr"
    assert list(metrics) == [f"critic/{name}" for name in names.split()]


def test_throughput_metrics_equal_a_calculation_by_hand() -> None:
    # 7 tokens, 4 of them prompts, in 2 s on 2 ranks.
    took = {"timing_s/step": 2.0, "timing_s/gen": 0.6, "timing_s/ref": 0.7, "timing_s/testing": 0.1}
    assert performance(experience(), took, 2) == pytest.approx(
        {
            "timing_per_token_ms/gen": 200.0,
            "timing_per_token_ms/ref": 100.0,
            "perf/total_num_tokens": 7.0,
            "perf/time_per_step": 2.0,
            "perf/throughput": 1.75,
        }
    )


def test_held_out_metrics_have_the_names_and_values_of_verl() -> None:
    responses = experience().with_objects(datasource=["gsm", "gsm", "math"], info_pred=["4", "5", None])
    metrics = heldout_metrics(responses.with_sequences(num_turns=torch.tensor([1, 3, 2])))
    assert metrics == {
        "val-aux/gsm/score/mean@1": 0.5,
        "val-aux/gsm/format/mean@1": 0.5,
        "val-core/gsm/reward/mean@1": 0.75,
        "val-aux/math/score/mean@1": 0.0,
        "val-aux/math/format/mean@1": 0.5,
        "val-core/math/reward/mean@1": -9.0,
        "val-aux/num_turns/mean": 2.0,
        "val-aux/num_turns/max": 3.0,
        "val-aux/num_turns/min": 1.0,
    }


def numbered(lengths: list[int]) -> Batch:
    return Batch(lengths, {"tokens": torch.zeros(sum(lengths))}, {"index": torch.arange(len(lengths))})


def test_ranks_get_equal_numbers_of_responses_and_similar_numbers_of_tokens() -> None:
    # The longest first, each to the rank with fewer tokens: 8 to one rank, 7 and 2 to the other, 1 to the first.
    batch, metrics = balanced(numbered([8, 7, 1, 2]), 2)
    assert batch["index"].tolist() == [0, 2, 1, 3]
    assert metrics == {
        "global_seqlen/min": 3.0,
        "global_seqlen/max": 15.0,
        "global_seqlen/minmax_diff": 12.0,
        "global_seqlen/balanced_min": 9.0,
        "global_seqlen/balanced_max": 9.0,
        "global_seqlen/mean": 9.0,
    }


def test_responses_that_do_not_divide_evenly_are_split_as_by_split() -> None:
    # 9 is more than 4 and 3 together, so the second rank has room for one more.
    batch, metrics = balanced(numbered([9, 4, 3]), 2)
    assert [part["index"].tolist() for part in batch.split(2)] == [[1, 2], [0]]
    assert (metrics["global_seqlen/balanced_min"], metrics["global_seqlen/balanced_max"]) == (7.0, 9.0)


def test_the_sequences_of_a_sample_stay_adjacent() -> None:
    batch, metrics = balanced(numbered([8, 7, 1, 2]).with_sequences(branch=torch.tensor([0, 1, 0, 0])), 2)
    assert batch["index"].tolist() == [0, 1, 2, 3]
    assert metrics["global_seqlen/balanced_max"] == metrics["global_seqlen/max"] == 15.0
    moved, _ = balanced(numbered([8, 7, 1, 2]).with_sequences(branch=torch.zeros(4, dtype=torch.int64)), 2)
    assert moved["index"].tolist() == [0, 2, 1, 3]
