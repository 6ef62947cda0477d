"""Keys of verl in recipes/verl_ppo: their meaning here, rejected keys, and the resulting job."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.installed import is_elsewhere
from recipes.verl_ppo.adapter import VERL, plain_arguments
from recipes.verl_ppo.config import VerlPPOConfig
from recipes.verl_ppo.main import main, read_config
from tests.messages import says
from tests.recipes.verl_commands import GRPO_ON_GSM8K, PPO_ON_GSM8K_AND_MATH, SMALL
from training.options.config import CommandLine, load_config
from training.options.schema import ConfigError

ROOT = Path(__file__).parents[2]

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
APART = ["trainer.role_mapping={actor: train, critic: train, rollout: sample}"]


def read(*arguments: str) -> VerlPPOConfig:
    return load_config(VerlPPOConfig, plain_arguments(arguments))


def small(*arguments: str) -> VerlPPOConfig:
    return read(*SMALL, *arguments)


@pytest.fixture
def vllm_is_elsewhere() -> Iterator[None]:
    """Read configurations as on a machine with vLLM, even if this one lacks it."""
    token = is_elsewhere.set(True)
    yield
    is_elsewhere.reset(token)


@pytest.mark.usefixtures("vllm_is_elsewhere")
def test_the_grpo_example_of_verl_has_the_same_settings_as_in_verl() -> None:
    arguments = plain_arguments(shlex.split(GRPO_ON_GSM8K))
    config = read(*arguments)
    assert (config.needs_critic, config.needs_reference, config.reward.model_path) == (False, True, "")
    assert (config.prompts_per_step, config.samples_per_prompt, config.rollout.max_new_tokens) == (1024, 5, 1024)
    assert config.mini_batch_size == 256 * 5
    assert (config.algorithm.kl_coef, config.algorithm.kl_estimator, config.algorithm.kl_in_reward) == (
        1e-3,
        "k3",
        False,
    )
    engine = read_config(arguments).engine("actor", steps=105)
    # 1024 / 256 optimizer steps in each of 105 steps, 32 sequences per pass, and 8 without gradients for the reference.
    assert (engine.total_steps, engine.max_sequences, engine.forward_max_sequences) == (420, 32, 8)
    # Enough tokens for 32 of the longest sequences, 512 + 1024 tokens each.
    assert (engine.max_tokens, engine.forward_max_tokens) == (32 * 1536, 8 * 1536)
    assert (engine.learning_rate, engine.weight_decay, engine.betas) == (1e-6, 0.01, (0.9, 0.999))
    assert (engine.zero_stage, engine.packing, engine.adam_offload, engine.engine) == (3, True, False, "fsdp")
    assert config.steps(7473 * config.data.epochs) == 15 * 7473 // 1024 == 109
    assert config.placement.frozen_models == "offloaded"
    wandb = config.log.sinks()["wandb"]
    assert (wandb["project"], wandb["run_name"]) == ("verl_grpo_example_gsm8k", "qwen3_8b_function_rm")
    assert (config.data.path, config.evaluation.path) == ("data/gsm8k/train.parquet", "data/gsm8k/test.parquet")
    assert (config.data.overlong, config.evaluation.temperature) == ("leave_out", 0.0)
    notes = [*config.notes({"critic.warmup_steps"}), *CommandLine(VerlPPOConfig, arguments).notes]
    assert [note.split(": ")[0] for note in notes] == [
        "no effect of critic.*",
        "rollout.tensor_parallel",
    ]


def test_the_ppo_example_of_verl_with_a_reward_model_has_the_same_settings_as_in_verl() -> None:
    config = read_config(plain_arguments(shlex.split(PPO_ON_GSM8K_AND_MATH)))
    assert (config.needs_critic, config.needs_reference) == (True, False)
    assert config.reward.model_path == "sfairXC/FsfairX-LLaMA3-RM-v0.1"
    assert config.data.path == "a/gsm8k.parquet,a/math.parquet"
    assert config.model.attn_implementation == "sdpa"
    assert config.evaluation.at_start is False
    # The buffer is that of the dapo reward manager.
    assert config.algorithm.overlong_buffer is None
    actor, critic = config.engine("actor", 10), config.engine("critic", 10)
    assert (actor.max_tokens, actor.max_sequences, actor.learning_rate) == (24000, 0, 1e-6)
    assert (critic.max_tokens, critic.learning_rate, config.reward.model_max_tokens) == (98304, 1e-5, 70000)
    # A warm-up ratio of 0.05 of ten training steps is 0 steps.
    assert (critic.total_steps, critic.adam_offload, critic.lr_warmup_ratio) == (80, True, 0.0)
    assert config.roles == ["actor_rollout", "critic", "rm"]
    assert config.placement.workers("rm") == 8


def test_defaults_are_those_of_verl() -> None:
    config = small()
    algorithm = config.algorithm
    assert (config.data.max_prompt_tokens, config.data.overlong, config.data.shuffle) == (512, "error", True)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip, config.train.max_grad_norm) == (
        0.2,
        0.2,
        3.0,
        1.0,
    )
    assert (algorithm.loss_aggregation, algorithm.entropy_coef, config.train.epochs, config.train.shuffle) == (
        "token-mean",
        0,
        1,
        False,
    )
    assert (config.size_of("critic"), config.critic.max_tokens, config.critic.value_clip) == (128, 32768, 0.5)
    assert (config.critic.learning_rate, config.critic.loss_aggregation) == (1e-5, None)
    assert (algorithm.gamma, algorithm.lam, algorithm.estimator, algorithm.kl_coef) == (1.0, 1.0, "gae", 0.0)
    assert (config.rollout.temperature, config.evaluation.temperature) == (1.0, 0.0)
    assert (config.evaluation.samples_per_prompt, config.data.epochs, config.checkpoint.every) == (1, 30, -1)
    assert (config.placement.holder("actor"), config.placement.holder("rollout")) == ("actor_rollout", "actor_rollout")
    # By default a mini-batch has 256 prompts as in verl, or all prompts of a smaller step.
    sizes = [word for word in SMALL if "mini_batch" not in word]
    assert read(*sizes).mini_batch_size == 64 * 8
    assert read(*sizes, "data.train_batch_size=512").mini_batch_size == 256 * 8


def test_options_of_all_recipes_can_be_combined_with_keys_of_verl() -> None:
    config = small("rollout.temperature=0.7", "train.max_tokens=99", "checkpoint.export_path=x", "critic.value_clip=1")
    assert (config.rollout.temperature, config.train.micro_batch_size) == (0.7, 4)
    assert (config.checkpoint.export_path, config.critic.value_clip) == ("x", 1.0)
    loaded = read("model.path=m", "data.path=task:sort", "prompts_per_step=8", "samples_per_prompt=2", "train.epochs=3")
    assert (loaded.mini_batch_size, loaded.updates_per_step) == (16, 3)


def test_batch_sizes_count_prompts_and_micro_batches_count_sequences() -> None:
    epochs = ["trainer.total_epochs=3", f"{A}.ppo_epochs=2", "critic.ppo_epochs=2", "critic.ppo_mini_batch_size=32"]
    config = read_config([*SMALL, *epochs, f"{A}.optim.lr_warmup_steps=3"])
    # Three epochs of 150 prompts are 450 prompts: 7 steps of 64, and 2 prompts.
    assert config.steps(150 * 3) == 7
    facts = ["7 steps", "64 prompts", "8 responses", "512", "8 optimizer steps", "128 responses", "at most 4 responses"]
    assert re.search(says(*facts, "last 2"), config.arithmetic(150))
    assert (config.size_of("actor"), config.size_of("critic")) == (128, 256)
    assert (config.engine("actor", 6).total_steps, config.engine("critic", 6).total_steps) == (6 * 2 * 4, 6 * 2 * 2)
    # The warm-up counts training steps and starts at 0. Each of the three has 8 optimizer steps with the same rate.
    engine = config.engine("actor", 6)
    rates = [engine.learning_rate_at(step) for step in (0, 7, 8, 15, 16, 23, 24)]
    assert rates == pytest.approx([0, 0, 1e-6 / 3, 1e-6 / 3, 2e-6 / 3, 2e-6 / 3, 1e-6])
    assert small(*epochs, "trainer.total_training_steps=5").steps(450) == 5


def test_validation_samples_with_val_kwargs_and_the_score_from_the_full_vocabulary() -> None:
    prefix = f"{R}.val_kwargs"
    config = small(
        "data.val_files=task:sort", f"{prefix}.do_sample=true", f"{prefix}.temperature=0.6", f"{prefix}.top_p=0.7"
    )
    drawn = small(
        "data.val_files=task:sort", f"{prefix}.do_sample=true", f"{prefix}.temperature=1", f"{prefix}.top_k=20"
    )
    assert (config.heldout_sampling.temperature, config.heldout_sampling.top_p) == (0.6, 0.7)
    assert (drawn.heldout_sampling.temperature, drawn.heldout_sampling.top_k) == (1.0, 20)
    assert config.sampling(1).top_p == 1.0
    # The temperature alone has no effect, because greedy responses are all equal.
    greedy = ["data.val_files=task:sort", f"{prefix}.do_sample=false", f"{prefix}.temperature=1", f"{prefix}.n=4"]
    assert (small(*greedy).evaluation.temperature, small(*greedy).evaluation.samples_per_prompt) == (0.0, 1)


@pytest.mark.parametrize(
    ("options", "correction"),
    [
        (["algorithm.rollout_correction.rollout_is=token"], ("tis", (0.0, 2.0), "token")),
        (
            [
                "algorithm.rollout_correction.rollout_is=token",
                "algorithm.rollout_correction.rollout_is_threshold=0.5_5.0",
            ],
            ("icepop", (0.5, 5.0), "token"),
        ),
        (
            ["algorithm.rollout_correction.rollout_is=sequence", "algorithm.rollout_correction.rollout_is_threshold=3"],
            ("tis", (0.0, 3.0), "sequence"),
        ),
        # Names of releases 0.6.0 and 0.5.0.
        (
            ["algorithm.rollout_is=True", "algorithm.rollout_is_threshold=4", "algorithm.rollout_is_level=token"],
            ("tis", (0.0, 4.0), "token"),
        ),
        ([f"{A}.tis_imp_ratio_cap=5"], ("tis", (0.0, 5.0), "token")),
        (["algorithm.rollout_is=False", f"{A}.tis_imp_ratio_cap=-1"], ("none", (0.0, 2.0), "token")),
    ],
)
def test_importance_weights_are_set_by_the_names_of_three_releases(options: list[str], correction: Any) -> None:
    algorithm = small(*options).algorithm
    assert (algorithm.correction, algorithm.correction_range, algorithm.correction_level) == correction


def test_rejection_bounds_apply_to_the_ratio_of_policy_to_engine_probability() -> None:
    prefix = "algorithm.rollout_correction"
    config = small(f"{prefix}.rollout_rs=token_k1, seq_mean_k3", f"{prefix}.rollout_rs_threshold=0.5_4.0, 0.1")
    # verl bounds the inverse ratio: its bounds 0.5 and 4 are 1/4 and 2 here.
    assert config.algorithm.rejections == [("token", "k1", 0.25, 2.0), ("geometric", "k3", None, 0.1)]
    one = small(f"{prefix}.rollout_rs=seq_sum_k1", f"{prefix}.rollout_rs_threshold=4.0").algorithm
    assert one.rejections == [("sequence", "k1", 0.25, 4.0)]


def test_resume_overrides_resume_mode() -> None:
    assert small().resume == "auto"
    assert small("trainer.resume_mode=disable").resume == "none"
    path = ["trainer.resume_mode=resume_path", "trainer.resume_from_path=a/step_3"]
    assert small(*path).resume == "a/step_3"
    assert small(*path, "resume=none").resume == "none"


def test_nulls_quotes_and_newer_names_have_the_same_meaning_as_in_verl(tmp_path: Path) -> None:
    config = small(
        "trainer.max_actor_ckpt_to_keep=null",
        "critic.ppo_mini_batch_size=null",
        f"{A}.optim.lr_warmup_steps=null",
        f"{A}.optim.lr_warmup_steps_ratio=0.5",
        "trainer.experiment_name='abc'",
        f'{A}.policy_loss.loss_mode="gspo"',
        "trainer.project_name='a','b'",
        "+reward.custom_reward_function.reward_kwargs.scale=2",
        "++actor_rollout_ref.model.override_config.max_position_embeddings=32768",
        "actor_rollout_ref.model.use_rmpad=false",
        "actor_rollout_ref.model.target_modules=[q_proj,v_proj]",
    )
    assert (config.checkpoint.keep, config.critic.mini_batch_size) == (2**31, None)
    assert (config.train.lr_warmup_ratio, config.train.packing) == (0.5, False)
    assert (config.log.wandb_name, config.log.wandb_project) == ("abc", "'a','b'")
    assert (config.algorithm.policy_loss, config.train.lora_target_modules) == ("gspo", "q_proj,v_proj")
    assert config.reward.arguments == {"scale": 2}
    assert config.model.config_overrides == {"max_position_embeddings": 32768}
    (tmp_path / "c.yaml").write_text("trainer: {esi_redundant_time: 3}\nray_init.num_cpus: 8\n")
    for form in ([f"--config={tmp_path}/c.yaml"], ["--config", f"{tmp_path}/c.yaml"]):
        assert re.search(
            says("trainer.esi_redundant_time", "ray_init.num_cpus"), CommandLine(VerlPPOConfig, form).notes[0]
        )


def test_a_yaml_file_of_verl_keys_is_read_as_by_hydra(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        """
        defaults: [ppo_trainer, _self_]
        actor_rollout_ref:
          _target_: verl.workers.config.Any
          model: {path: x, override_config: {rope_theta: 9}}
          rollout:
            name: ???
            n: 4
            response_length: ${data.max_response_length}
          actor: {ppo_mini_batch_size: 8, optim: {lr: 1e-5}}
        critic: {ppo_mini_batch_size: "${oc.select:actor_rollout_ref.actor.ppo_mini_batch_size,256}", enable: null}
        data: {train_files: [a.parquet, b.parquet], val_files: null, train_batch_size: 16, max_response_length: 64}
        """
    )
    config = read(f"--config={tmp_path}/c.yaml", f"{A}.ppo_mini_batch_size=4")
    assert (config.samples_per_prompt, config.rollout.max_new_tokens, config.train.learning_rate) == (4, 64, 1e-5)
    # The value of the command line, which interpolations in the file use too.
    assert (config.train.mini_batch_size, config.critic.mini_batch_size) == (16, 16)
    assert (config.data.path, config.evaluation.path) == ("a.parquet,b.parquet", None)
    assert (config.critic.enabled, config.rollout.engine) == (None, "auto")
    assert config.model.config_overrides == {"rope_theta": 9}


@pytest.mark.parametrize(
    ("options", "on_cpus", "on_gpus"),
    [
        ([], "fp32", "bf16"),
        (["model_dtype=float32"], "fp32", "bf16_autocast"),
        (["model_dtype=fp32", "dtype=bfloat16"], "fp32", "bf16_autocast"),
        (["model_dtype=fp32", "dtype=float32"], "fp32", "fp32"),
        (["mixed_precision.param_dtype=fp32"], "fp32", "fp32"),
        (["model_dtype=bfloat16"], "bf16", "bf16"),
    ],
)
def test_fp32_keeps_float32_weights_and_multiplies_in_bfloat16_on_gpus(
    options: list[str], on_cpus: str, on_gpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for visible, precision in (("", on_cpus), ("0", on_gpus)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        engine_options = [f"{R}.name=hf", "reward_model.num_workers=1"]
        config = read_config([*SMALL, *engine_options, *(f"{A}.fsdp_config.{option}" for option in options)])
        assert config.train.precision == precision
        assert config.critic.precision == ("bf16" if visible else "fp32")


def test_options_without_effect_are_named() -> None:
    named = """
        actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.gpu_memory_utilization=0.6
        actor_rollout_ref.rollout.enforce_eager=true actor_rollout_ref.model.lora_alpha=8
        algorithm.adv_estimator=grpo algorithm.gamma=0.9 algorithm.lam=0.9
        algorithm.rollout_correction.rollout_rs_threshold=2 critic.optim.lr=1e-5 data.val_files=task:sort
    """
    notes = small(*named.split()).notes(
        {
            "algorithm.gamma",
            "algorithm.lam",
            "algorithm.rejection_threshold",
            "critic.learning_rate",
            "train.lora_alpha",
            "rollout.gpu_memory",
            "rollout.enforce_eager",
        }
    )
    names = [name for note in notes for name in note.removeprefix("no effect of ").split(": ")[0].split(", ")]
    assert sorted(names) == [
        "algorithm.gamma",
        "algorithm.lam",
        "algorithm.rejection_threshold",
        "critic.*",
        "rollout.enforce_eager",
        "rollout.gpu_memory",
        "train.lora_alpha",
    ]


# --- the keys


@pytest.mark.parametrize(
    ("argument", "facts"),
    [
        (f"{A}.strategy=deepspeed", ["deepspeed", f"{A}.strategy=fsdp2"]),
        ("--config-name=mine", ["--config-name=mine", "--config FILE"]),
        (f"{R}.multi_turn.enable=True", ["multi_turn", "agent_func_path"]),
        (f"{R}.multi_turn.tool_config_path=a.yaml", ["tool_config_path", "a.yaml"]),
        (f"{R}.name=tgi", [f"{R}.name=tgi", "vllm"]),
        ("trainer.device=npu", ["trainer.device=npu", "NVIDIA"]),
        ("trainer.default_hdfs_dir=hdfs://a", ["default_hdfs_dir", "trainer.default_local_dir"]),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.dtype=half", ["rollout.engine_kwargs"]),
        (f"{A}.optim.optimizer=Adafactor", [f"{A}.optim.optimizer", "AdamW"]),
        ("data.custom_cls.path=a.py", ["data.custom_cls.path", "data.custom_cls.name"]),
        ("data.sampler.class_path=a.py", ["data.sampler.class_path", "scripts/data_preprocess"]),
        (f"{R}.agent.default_agent_loop=mine", ["default_agent_loop=mine", "agent_loop_config_path"]),
        (f"{R}.agent.custom_agent_loop_loader=a.b", ["custom_agent_loop_loader=a.b", "_target_"]),
        ("critic.model.override_config.attention_dropout=0.1", ["attention_dropout=0.1", "config.json"]),
        (f"{A}.no_such_key=1", [f"'{A}.no_such_key'"]),
    ],
)
def test_the_error_for_an_unsupported_key_names_the_alternative(argument: str, facts: list[object]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)):
        small(argument)


@pytest.mark.parametrize(
    "chosen", [f"{A}.strategy=megatron", "--config-name=ppo_megatron_trainer", "model_engine=megatron"]
)
def test_megatron_keys_become_fully_shard_with_the_same_parallel_axes(chosen: str) -> None:
    keys = [f"{A}.megatron.{name}_parallel_size" for name in ("tensor_model", "context", "pipeline_model")]
    config = small(chosen, f"{keys[0]}=2", f"{keys[1]}=4", f"{keys[2]}=8", f"{A}.megatron.param_offload=True")
    assert (config.parallel.tensor, config.parallel.context, config.parallel.expert) == (2, 4, 1)
    assert (config.train.engine, config.train.adam_offload) == ("fsdp", True)
    mixed = small(chosen, f"{keys[0]}=2", f"{A}.megatron.expert_model_parallel_size=4")
    assert (mixed.parallel.tensor, mixed.parallel.expert) == (1, 4)


def test_unsupported_engines_and_devices_are_reported_first() -> None:
    keys = ["+x.y=1", f"{A}.optim.optimizer=adam", f"{A}.strategy=deepspeed", "--config-name=mine"]
    with pytest.raises(ConfigError) as error:
        small(*keys, "trainer.device=npu")
    lines = str(error.value).splitlines()[1:]
    assert [word in line for word, line in zip(("deepspeed", "npu", "mine"), lines)] == [True] * 3
    assert len(lines) == 5


@pytest.mark.parametrize(
    "argument",
    [
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size=4",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=32",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=bf16",
        "actor_rollout_ref.actor.ppo_micro_batch_size=128",
        "actor_rollout_ref.rollout.data_parallel_size=4",
        "actor_rollout_ref.model.trust_remote_code=True",
        "actor_rollout_ref.actor.profiler.enable=True",
        "reward_model.use_reward_loop=True",
        "reward_model.sandbox_fusion.url=http://a",
        "trainer.balance_batch=False",
        "trainer.logger=[console,swanlab]",
        "reward_model.reward_manager=prime",
    ],
)
def test_keys_that_change_no_results_are_accepted_with_a_note(argument: str) -> None:
    config, plain = small(argument), small()
    config.run_dir = plain.run_dir
    assert config == plain
    assert len(CommandLine(VerlPPOConfig, [*SMALL, argument]).notes) == 1


def test_disabled_switches_and_values_equal_to_the_behaviour_are_accepted() -> None:
    values = [(name, one) for name, one in VERL.refused.items() if "*" not in name]
    arguments = [f"{name}={one.harmless or ('false' if one.kind is bool else 'null')}" for name, one in values]
    assert small(*arguments) == small()
    assert CommandLine(VerlPPOConfig, arguments).notes == []


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ([f"{A}.ppo_mini_batch_size=24"], [f"{A}.ppo_mini_batch_size=24", "data.train_batch_size=64"]),
        (["critic.ppo_mini_batch_size=24"], ["critic.ppo_mini_batch_size=24", "data.train_batch_size=64"]),
        ([f"{A}.ppo_epochs=0"], [f"{A}.ppo_epochs=0"]),
        (["algorithm.adv_estimator=grpo_passk", f"{R}.n=1"], ["grpo_passk", f"{R}.n=1"]),
        (
            ["algorithm.adv_estimator=optimal_token_baseline", "algorithm.rollout_correction.bypass_mode=true"],
            ["optimal_token_baseline", "bypass_mode"],
        ),
        (["algorithm.adv_estimator=vtrace"], ["vtrace", "opo"]),
        ([f"{A}.policy_loss.loss_mode=dro", f"{A}.policy_loss.dro_beta=0"], ["dro_beta=0", "above 0"]),
        ([f"{A}.policy_loss.loss_mode=vpo"], ["loss_mode=vpo", "vanilla"]),
        ([f"{A}.loss_agg_mode=token"], ["loss_agg_mode=token", "seq-mean-token-sum"]),
        (["reward_model.reward_manager=mine"], ["reward_manager=mine", "naive"]),
        (["critic.loss_agg_mode=mean"], ["critic.loss_agg_mode=mean", "seq-mean-token-sum"]),
        (["critic.cliprange_value=0"], ["critic.cliprange_value=0"]),
        (
            [*APART, "trainer.resource_pool_spec={train: [1], sample: [513]}"],
            ["rollout", 513, 512],
        ),
        ([f"{A}.fsdp_config.model_dtype=bf16", f"{A}.fsdp_config.dtype=float32"], ["model_dtype=bf16", "fp32"]),
        (["algorithm.adv_estimator=gdpo"], ["gdpo", "algorithm.gdpo_reward_keys"]),
        (["critic.enable=False"], ["critic.enable=false", "adv_estimator=gae"]),
        ([f"{R}.temperature=0"], [f"{R}.temperature=0.0"]),
        ([f"{A}.kl_loss_type=full", f"{A}.use_kl_loss=True"], ["full", "kl"]),
        ([f"{A}.clip_ratio=-0.5"], ["clip", -0.5]),
        (
            [
                *(
                    f"algorithm.{one}"
                    for one in ("use_kl_in_reward=True", "kl_ctrl.type=adaptive", "kl_ctrl.horizon=100")
                )
            ],
            ["algorithm.kl_ctrl", 100],
        ),
        (["algorithm.rollout_correction.rollout_rs=seq_mean_k2"], ["rollout_rs", "rollout_rs_threshold"]),
        (
            [f"algorithm.rollout_correction.rollout_rs{rest}" for rest in ("=seq_max_k1", "_threshold=1")],
            ["rollout_rs=seq_max_k1"],
        ),
        (["algorithm.rollout_correction.rollout_is=batch"], ["rollout_is=batch", "token", "sequence"]),
        (["reward_model.enable=True"], ["reward_model.enable", "reward_model.model.path"]),
        (["trainer.resume_mode=resume_path"], ["trainer.resume_mode=resume_path", "trainer.resume_from_path"]),
        (["trainer.val_only=true", "data.val_files=null"], ["trainer.val_only", "data.val_files"]),
        (["async_train=true"], ["async_train", "actor_rollout_ref.hybrid_engine=false"]),
        (["trainer.role_mapping={actor: global_pool, critic: global_pool}"], ["role_mapping", "rollout"]),
        (["trainer.role_mapping={actor_rollout: a, critic: a}"], ["resource_pool_spec", "global_pool"]),
        (["trainer.resource_pool_spec={global_pool: [2, 1]}"], ["resource_pool_spec", "[2, 1]"]),
        (["data.label_key=x"], ["data.label_key=x"]),
    ],
)
def test_invalid_verl_options_are_rejected_with_the_option_to_set(options: list[str], facts: list[object]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)):
        small(*options)


def test_too_few_prompts_for_a_step_are_rejected_with_the_names_of_verl(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "data.train_max_samples=3", "trainer.total_epochs=1"]) == 2
    facts = ["task:sort", "3 prompts", "data.train_batch_size=64", "data.train_max_samples", "trainer.total_epochs"]
    assert re.search(says(*facts), capsys.readouterr().err)


# --- the page


def test_the_page_from_verl_matches_the_table_and_names_every_key() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "migration_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    page = (ROOT / "docs" / "from_verl.md").read_text()
    named = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`[^|]*)\|", page, re.MULTILINE)))
    said = [name for part in (VERL.no_effect, VERL.refused) for name, one in part.items() if one.why]
    assert sorted(named) == sorted([*VERL.options, *VERL.computed, *said])
