"""Keys that only some releases or recipes of verl have."""

import re

import pytest

from recipes.verl_ppo.adapter import plain_arguments
from recipes.verl_ppo.config import VerlPPOConfig
from tests.messages import says
from training.options.config import CommandLine
from training.options.schema import ConfigError

SMALL = ["data.train_files=rows.jsonl", "actor_rollout_ref.model.path=policy", "data.train_batch_size=64"]
LORA = "actor_rollout_ref.model.lora"
LOSS = "distillation.distillation_loss"
TEACHER = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "trainer.n_gpus_per_node=8",
    "distillation.enabled=True",
    "distillation.n_gpus_per_node=4",
    "distillation.nnodes=1",
    "distillation.teacher_models.teacher_model.model_path=teacher",
    "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=2",
    f"{LOSS}.loss_mode=k1",
    f"{LOSS}.topk=64",
    f"{LOSS}.use_task_rewards=False",
    f"{LOSS}.use_policy_gradient=True",
    f"{LOSS}.loss_max_clamp=10.0",
    f"{LOSS}.log_prob_min_clamp=-10.0",
]
"""Keys of verl's example of on-policy distillation (0.9)."""


def read(*arguments: str) -> CommandLine[VerlPPOConfig]:
    return CommandLine(VerlPPOConfig, plain_arguments([*SMALL, *arguments]))


@pytest.mark.parametrize(
    ("keys", "bypass"),
    [
        (["use_rollout_log_probs=True"], True),
        (["use_rollout_log_probs=True", "compute_prox_log_prob=False"], True),
        (["use_rollout_log_probs=True", "compute_prox_log_prob=True"], False),
        (["use_rollout_log_probs=False"], False),
    ],
)
def test_fully_async_training_uses_the_log_probabilities_of_the_engine(keys: list[str], bypass: bool) -> None:
    group = ["staleness_threshold=0.5", "trigger_parameter_sync_step=4", *keys]
    config = read(
        "actor_rollout_ref.actor.ppo_mini_batch_size=16", *(f"async_training.{key}" for key in group)
    ).config()
    assert config.algorithm.bypass is bypass
    assert (config.prompts_per_step, config.asynchronous.queue_size) == (64, 1)


@pytest.mark.parametrize(
    ("layers", "targets"),
    [
        ("[linear_qkv,linear_proj,linear_fc1,linear_fc2]", "all-linear"),
        ("[linear_q,linear_fc1_up]", "q_proj,up_proj"),
        ("[o_proj]", "o_proj"),
    ],
)
def test_adapters_of_megatron_map_to_the_same_layers(layers: str, targets: str) -> None:
    line = read(f"{LORA}.rank=8", f"{LORA}.alpha=16", f"{LORA}.dropout=0.1", f"+{LORA}.target_modules={layers}")
    train = line.config().train
    assert (train.lora_rank, train.lora_alpha, train.lora_dropout) == (8, 16.0, 0.1)
    assert train.lora_target_modules == targets
    assert any(re.search(says("canonical_lora"), note) for note in line.notes)


def test_adapters_of_megatron_have_the_alpha_of_verl_and_kinds_that_are_missing_are_rejected() -> None:
    assert read(f"{LORA}.rank=8", f"{LORA}.type=canonical_lora").config().train.lora_alpha == 32.0
    with pytest.raises(ConfigError, match=says(f"{LORA}.type=dora", "canonical_lora")):
        read(f"{LORA}.rank=8", f"{LORA}.type=dora").config()


def test_distillation_uses_its_teacher_as_reference_in_a_separate_pool() -> None:
    line = read(*TEACHER)
    config = line.config()
    assert (config.algorithm.estimator, config.algorithm.reference_path) == ("distillation", "teacher")
    assert config.placement.pools == {"global_pool": [8], "teacher": [4]}
    assert (config.placement.role_pools["ref"], config.placement.nodes) == ("teacher", 2)
    assert config.needs_reference
    assert any(re.search(says("teacher", "transformers", "topk"), note) for note in line.notes)
    assert not any("mini-batches" in note for note in line.notes)
    several = read(*TEACHER, "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    assert any(re.search(says("advantages", "mini-batches"), note) for note in several.notes)


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        (f"{LOSS}.loss_mode=forward_kl_topk", ["forward_kl_topk", "loss_mode=k1"]),
        (f"{LOSS}.use_policy_gradient=False", ["use_policy_gradient=true"]),
        (f"{LOSS}.use_task_rewards=True", ["use_task_rewards=true", "use_kl_loss=true"]),
        (f"{LOSS}.loss_max_clamp=2", ["loss_max_clamp=2", "10"]),
        ("distillation.teacher_models.second.model_path=other", ["2 teachers", "teacher_model.model_path"]),
    ],
)
def test_other_kinds_of_distillation_are_rejected_with_the_replacement(key: str, facts: list[str]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)):
        read(*TEACHER, key).config()


def test_eight_bit_weights_of_engines_need_a_correction() -> None:
    for key in ("quantization=fp8", "quantization.weight_dtype=fp8", "engine_kwargs.vllm.quantization=fp8"):
        with pytest.raises(ConfigError, match=says("fp8", "correction")):
            read(f"+actor_rollout_ref.rollout.{key}").config()
        config = read(f"+actor_rollout_ref.rollout.{key}", "algorithm.rollout_correction.rollout_is=token").config()
        assert config.rollout.vllm == {"quantization": "fp8"}
    with pytest.raises(ConfigError, match=says("quantization=torchao", "fp8")):
        read("actor_rollout_ref.rollout.quantization=torchao").config()
    assert read("++actor_rollout_ref.rollout.quantization=null").config().rollout.vllm == {}


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        ("fp8=e4m3", ["fp8", "bfloat16"]),
        ("moe_aux_loss_coeff=0.01", ["moe_aux_loss_coeff", "train.router_aux_loss_coef"]),
        ("attention_dropout=0.1", ["attention_dropout", "override_config"]),
    ],
)
def test_settings_of_megatron_that_change_results_are_rejected(key: str, facts: list[str]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)):
        read(f"+actor_rollout_ref.actor.megatron.override_transformer_config.{key}").config()


def test_each_key_of_eight_bit_training_is_rejected() -> None:
    with pytest.raises(ConfigError, match=says("fp8_recipe", "bfloat16", "leave fp8 out")):
        read("+actor_rollout_ref.actor.optim.override_optimizer_config.fp8_recipe=blockwise").config()


def test_a_command_of_the_spin_recipe_gets_a_note_with_the_loss_used() -> None:
    line = read("+trainer.ref_update_freq=1", "algorithm.kl_ctrl.kl_coef=0.001")
    assert line.config().algorithm.reference_sync_steps == 1
    assert any(re.search(says("ref_update_freq", "loss of the spin recipe"), note) for note in line.notes)


def test_a_key_after_a_tilde_is_not_set() -> None:
    line = read(
        "data.seed=7", "actor_rollout_ref.actor.optim.lr=1", "~data.seed", "~actor_rollout_ref.actor.optim.lr=1"
    )
    assert (line.config().seed, line.config().train.learning_rate) == (read().config().seed, 1e-6)


def test_the_final_learning_rate_of_megatron_is_a_share_of_the_peak() -> None:
    optim = "actor_rollout_ref.actor.optim"
    cosine = read(f"{optim}.lr=1e-5", f"{optim}.min_lr=1e-6", f"{optim}.lr_decay_style=cosine").config().train
    assert (cosine.lr_scheduler, cosine.min_lr_ratio) == ("cosine_with_min_lr", pytest.approx(0.1))
    line = read(f"{optim}.min_lr=1e-6")
    assert any(re.search(says("no effect", f"{optim}.min_lr", "constant"), note) for note in line.notes)


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.actor.megatron.use_mbridge=true",
        "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform",
        "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode=off",
        "actor_rollout_ref.model.mtp.detach_encoder=true",
        "actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3",
        "async_training.checkpoint_engine.enable=true",
        "actor_rollout_ref.actor.profiler.ranks=[0]",
    ],
)
def test_a_setting_within_a_feature_has_a_note(key: str) -> None:
    notes = read(key).notes
    assert any(re.search(says("no effect", key.partition("=")[0]), note) for note in notes), notes


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("actor_rollout_ref.actor.megatron.override_transformer_config.freeze_moe_router=true", "weights are trained"),
        ("actor_rollout_ref.actor.optim.lr_warmup_init=1e-7", "learning rate of 0"),
        ("actor_rollout_ref.actor.load_weight=false", "always loaded"),
        ("actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts=3", "sampled once"),
        ("trainer.v1.trainer_mode=separate_async", "async_training.staleness_threshold"),
        ("actor_rollout_ref.model.mtp.enable=true", "leave it out"),
    ],
)
def test_a_setting_within_a_feature_that_changes_the_result_is_refused(key: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=says(key.partition("=")[0], reason)):
        read(key).config()


def test_a_frequency_of_false_switches_the_evaluation_off() -> None:
    config = read("trainer.test_freq=False", "trainer.save_freq=False").config()
    assert (config.evaluation.every, config.checkpoint.every) == (-1, -1)


def test_a_configuration_file_with_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=says("ppo_megatron_trainer_mine", "--config FILE")):
        read("--config-name=ppo_megatron_trainer_mine").config()
    assert read("--config-name=ppo_megatron_trainer.yaml").config().train.engine == "fsdp"
