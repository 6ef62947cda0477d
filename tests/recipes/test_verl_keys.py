"""verl's keys that change numbers mean what they mean in verl 0.9.1, or the start of a run names the difference."""

import re

import pytest

from recipes.verl_ppo.adapter import plain_arguments
from recipes.verl_ppo.config import VerlPPOConfig
from recipes.verl_ppo.main import main
from tests.messages import says
from tests.recipes.verl_commands import SMALL
from training.options.config import CommandLine, load_config
from training.options.schema import ConfigError


def small(*arguments: str) -> VerlPPOConfig:
    """The configuration of a small command with these arguments besides."""
    return load_config(VerlPPOConfig, plain_arguments([*SMALL, *arguments]))


LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"


@pytest.mark.parametrize("kind", ["gspo", "sapo", "geo_mean"])
def test_losses_of_whole_responses_are_means_over_responses_as_verl_forces_it(kind: str) -> None:
    line = CommandLine(VerlPPOConfig, [*SMALL, f"{LOSS}={kind}"])
    own = line.config().algorithm
    assert (own.policy_aggregation, own.loss_aggregation) == ("seq-mean-token-mean", "token-mean")
    assert any(re.search(says(f"loss_mode={kind}", "loss_agg_mode", "entropy and KL"), note) for note in line.notes)
    same = CommandLine(
        VerlPPOConfig, [*SMALL, f"{LOSS}={kind}", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"]
    )
    assert same.config().algorithm.policy_aggregation == "seq-mean-token-mean"
    assert not any("loss_mode" in note for note in same.notes)
    # The recipe's own names leave the choice.
    assert (
        load_config(
            VerlPPOConfig, ["model.path=m", "data.path=d", "algorithm.policy_loss=gspo"]
        ).algorithm.policy_aggregation
        is None
    )


@pytest.mark.parametrize(("kind", "loss"), [("", "ppo"), ("ppo_clip", "ppo"), ("reinforce", "reinforce")])
def test_bypass_takes_the_loss_of_rollout_correction_as_verl_does(kind: str, loss: str) -> None:
    group = "algorithm.rollout_correction"
    keys = [f"{group}.bypass_mode=true", *([f"{group}.loss_type={kind}"] if kind else [])]
    line = CommandLine(VerlPPOConfig, [*SMALL, *keys, f"{LOSS}=gspo"])
    own = line.config().algorithm
    assert (own.policy_loss, own.policy_aggregation) == (loss, None)
    assert any(re.search(says("no effect", "loss_mode=gspo", "bypass_mode"), note) for note in line.notes)
    plain = CommandLine(VerlPPOConfig, [*SMALL, *keys])
    assert plain.config().algorithm.policy_loss == loss
    assert not any("loss_mode" in note for note in plain.notes)


@pytest.mark.parametrize(("owner", "group"), [("actor_rollout_ref.actor", "train"), ("critic", "critic")])
def test_the_limit_of_gradients_is_the_optimizers_else_grad_clip(owner: str, group: str) -> None:
    for keys, norm, noted in (
        ([f"{owner}.grad_clip=0.5"], 0.5, "later releases"),
        ([f"{owner}.optim.clip_grad=0.7", f"{owner}.grad_clip=0.5"], 0.7, "no effect"),
        ([f"{owner}.grad_clip=0.5", f"{owner}.optim.clip_grad=0.7"], 0.7, "no effect"),
        ([f"{owner}.optim.clip_grad=0.7"], 0.7, ""),
        ([f"{owner}.grad_clip=1.0", f"{owner}.optim.clip_grad=1.0"], 1.0, ""),
    ):
        line = CommandLine(VerlPPOConfig, [*SMALL, *keys])
        assert getattr(line.config(), group).max_grad_norm == norm
        assert [note for note in line.notes if "clip" in note] == [
            note for note in line.notes if noted and noted in note
        ]
        assert bool(noted) == any("clip" in note for note in line.notes)


def test_the_optimal_token_baseline_beside_an_environment_names_the_difference() -> None:
    keys = ["algorithm.adv_estimator=optimal_token_baseline", "agent.func_path=env:guess"]
    line = CommandLine(VerlPPOConfig, [*SMALL, *keys])
    assert any("tir_optimal_token_baseline" in note for note in line.notes)
    assert not any("tir_optimal" in note for note in CommandLine(VerlPPOConfig, [*SMALL, keys[0]]).notes)


def test_actor_and_critic_have_one_kind_of_engine() -> None:
    for actor, critic in (("fsdp", "megatron"), ("megatron", "fsdp2")):
        keys = [f"actor_rollout_ref.actor.strategy={actor}", f"critic.strategy={critic}"]
        with pytest.raises(ConfigError, match=says(f"actor.strategy={actor}", f"critic.strategy={critic}")):
            small(*keys)
    assert small("actor_rollout_ref.actor.strategy=fsdp2", "critic.strategy=fsdp").train.engine == "fsdp"


def test_keys_of_the_entropy_recipe_mean_the_same_at_their_old_place() -> None:
    actor = "actor_rollout_ref.actor"
    old = small(
        f"{actor}.loss_mode=clip_cov",
        f"{actor}.clip_cov_ratio=0.01",
        f"{actor}.clip_cov_lb=2",
        f"{actor}.clip_cov_ub=4",
    )
    own = old.algorithm
    assert (own.policy_loss, own.cov_share, own.cov_low, own.cov_high) == ("clip_cov", 0.01, 2.0, 4.0)
    kl = small(f"{actor}.loss_mode=kl_cov", f"{actor}.k_percent=0.2", f"{actor}.ppo_kl_coef=0.5").algorithm
    assert (kl.policy_loss, kl.cov_share, kl.kl_cov_coef) == ("kl_cov", 0.002, 0.5)


@pytest.mark.parametrize(("key", "aggregation"), [("True", "token-mean"), ("False", "seq-mean-token-mean")])
def test_the_switch_of_the_early_dapo_recipe_is_an_aggregation(key: str, aggregation: str) -> None:
    read = small(f"actor_rollout_ref.actor.use_token_level_loss={key}")
    assert read.algorithm.loss_aggregation == aggregation


@pytest.mark.parametrize(
    ("name", "facts"),
    [("quantization=fp8", ["quantization", "weights"]), ("kv_cache_dtype=fp8", ["kv_cache_dtype", "auto"]),
     ("logprobs_mode=raw_logprobs", ["logprobs_mode", "processed_logprobs"])],
)  # fmt: skip
def test_arguments_of_vllm_that_change_log_probabilities_are_refused_by_name(name: str, facts: list[str]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)):
        small(f"+actor_rollout_ref.rollout.engine_kwargs.vllm.{name}")


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.cpu_offload_gb=4", ["cpu_offload_gb", "engines"]),
        ("data.response_key=x", ["response_key"]),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.method=ngram", ["speculat", "speed"]),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.disable_custom_all_reduce=true", ["disable_custom_all_reduce"]),
    ],
)
def test_what_is_taken_without_an_effect_is_named(
    key: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, key, "--print_config"]) == 0
    assert re.search(says("no effect", *facts), capsys.readouterr().err)


def test_arguments_of_vllm_that_are_options_here_are_these() -> None:
    engine = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    own = small(f"{engine}.enforce_eager=true", f"{engine}.gpu_memory_utilization=0.3").rollout
    assert (own.enforce_eager, own.gpu_memory) == (True, 0.3)
    with pytest.raises(ConfigError, match=says(f"{engine}.kv_cache_dtype")):
        small(f"{engine}.kv_cache_dtype=fp8")


def test_num_examine_is_taken_and_a_misspelt_key_beside_it_is_told_the_nearest() -> None:
    for key in ("reward_model.num_examine", "reward.num_examine"):
        assert small(f"{key}=2").reward.num_examine == 2
    with pytest.raises(ConfigError, match=says("num_exmine", "reward_model.num_examine")):
        small("reward_model.num_exmine=1")


@pytest.mark.parametrize(
    "key",
    [
        "data.apply_chat_template_kwargs={enable_thinking:False}",
        "+data.apply_chat_template_kwargs.enable_thinking=False",
    ],
)
def test_arguments_of_the_chat_template_are_taken(key: str) -> None:
    assert small(key).model.template_arguments == {"enable_thinking": False}


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.rollout.repetition_penalty=1.0",
        "actor_rollout_ref.rollout.use_fire_sampling=False",
        "actor_rollout_ref.rollout.min_p=0.0",
    ],
)
def test_values_that_ask_for_what_happens_anyway_are_taken_without_a_word(key: str) -> None:
    line = CommandLine(VerlPPOConfig, [*SMALL, key])
    line.config()
    assert not any(key.rpartition(".")[2].partition("=")[0] in note for note in line.notes)
    other = {"1.0": "1.2", "False": "True", "0.0": "0.1"}[key.partition("=")[2]]
    with pytest.raises(ConfigError, match=says(key.partition("=")[0])):
        small(f"{key.partition('=')[0]}={other}")


def test_rejection_by_the_names_of_0_7_has_the_bounds_of_the_inverse() -> None:
    group = "algorithm.rollout_correction"
    for level, rule in (("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")):
        bounds = [f"{group}.rollout_rs_threshold=4.0", f"{group}.rollout_rs_threshold_lower=0.5"]
        own = small(f"{group}.rollout_rs={level}", *bounds).algorithm
        assert own.rejection == rule
        # The policy's probability over the engine's between 1/2 and 4: the engine's over the policy's from 1/4 to 2.
        assert own.rejection_threshold == "0.25_2.0"
