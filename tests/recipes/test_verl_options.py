"""verl's keys in recipes/verl_ppo: what they mean here, which are refused, and what job they make."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.verl_ppo.config import VerlPPOConfig, idle_notes, plain_arguments
from recipes.verl_ppo.keys import KEYS
from recipes.verl_ppo.main import main
from recipes.verl_ppo.resource_pool import ResourcePoolManager, Role
from recipes.verl_ppo.run import shared_options
from tests.messages import says
from tests.recipes.verl_commands import GRPO_ON_GSM8K, PPO_ON_GSM8K_AND_MATH, SMALL
from training.config import given_options, load_config
from training.schema import ConfigError, options_of

ROOT = Path(__file__).parents[2]

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
APART = ["actor_rollout_ref.hybrid_engine=false", "trainer.role_mapping={actor: train, critic: train, rollout: sample}"]


def read(*arguments: str) -> VerlPPOConfig:
    return load_config(VerlPPOConfig, plain_arguments(arguments))


def small(*arguments: str) -> VerlPPOConfig:
    return read(*SMALL, *arguments)


def test_verls_grpo_example_is_read_as_verl_means_it() -> None:
    arguments = plain_arguments(shlex.split(GRPO_ON_GSM8K))
    config = read(*arguments)
    assert (config.needs_critic, config.needs_reference, config.reward_model.enable) == (False, True, False)
    assert (config.prompts_per_step, config.samples_per_prompt, config.rollout.max_new_tokens) == (1024, 5, 1024)
    assert config.minibatch_sequences("actor") == 256 * 5
    engine = config.engine("actor", steps=105)
    # 1024 / 256 optimizer steps in each of 105 steps, 32 sequences at a time; 16 and 8 without gradients.
    assert (engine.total_steps, engine.max_sequences, engine.forward_max_sequences) == (420, 32, 16)
    assert (engine.learning_rate, engine.weight_decay, engine.betas) == (1e-6, 0.01, (0.9, 0.999))
    assert (engine.zero_stage, engine.packing, engine.adam_offload, engine.engine) == (3, True, False, "fsdp")
    assert config.forward_limits("ref")[1] == 8
    assert config.steps(7473) == 15 * 7473 // 1024 == 109
    sinks = shared_options(config).log.sinks()
    assert (sinks["wandb"].project, sinks["wandb"].run_name) == ("verl_grpo_example_gsm8k", "qwen3_8b_function_rm")
    assert config.data.train_files == ["data/gsm8k/train.parquet"]
    notes = [*config.notes(given_options(VerlPPOConfig, arguments)), *idle_notes(arguments)]
    assert [note.split(": ")[0] for note in notes] == [
        "tensor_model_parallel_size",
        "no effect of data.truncation",
        "no effect of trainer.critic_warmup",
        "no effect of actor_rollout_ref.ref.fsdp_config.param_offload",
    ]


def test_verls_ppo_example_with_a_reward_model_is_read_as_verl_means_it() -> None:
    config = read(*shlex.split(PPO_ON_GSM8K_AND_MATH))
    assert (config.needs_critic, config.needs_reference, config.reward_model.enable) == (True, False, True)
    assert config.data.train_files == ["a/gsm8k.parquet", "a/math.parquet"]
    assert config.actor_rollout_ref.model.override_config.attn_implementation == "sdpa"
    assert config.trainer.val_before_train is False
    assert config.reward_model.reward_kwargs == {
        "overlong_buffer_cfg": {"enable": True, "len": 128},
        "max_resp_len": 512,
    }
    actor, critic = config.engine("actor", 10), config.engine("critic", 10)
    assert (actor.max_tokens, actor.max_sequences, actor.learning_rate) == (24000, 0, 1e-6)
    assert (critic.max_tokens, critic.forward_max_tokens, critic.learning_rate) == (98304, 98304, 1e-5)
    assert (critic.total_steps, critic.adam_offload, critic.lr_warmup_ratio) == (80, True, 0.05)
    assert [config.forward_limits(part)[0] for part in ("actor", "ref", "critic", "rm")] == [24000, 24000, 98304, 70000]
    assert config.pools.mapping == dict.fromkeys(["actor_rollout", "critic", "rm"], "global_pool")
    assert config.pools.workers("rm") == 8


def test_what_is_not_set_is_as_in_verl() -> None:
    config = small()
    own, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    assert (config.data.max_prompt_length, config.data.truncation, config.data.shuffle) == (512, "error", True)
    assert (actor.clip_low, actor.clip_high, actor.clip_ratio_c, actor.grad_clip) == (0.2, 0.2, 3.0, 1.0)
    assert (actor.loss_agg_mode, actor.entropy_coeff, actor.ppo_epochs, actor.shuffle) == ("token-mean", 0, 1, False)
    assert (config.critic.ppo_mini_batch_size, config.critic.ppo_micro_batch_size_per_gpu) == (16, 4)
    assert (config.critic.cliprange_value, config.critic.optim.lr, config.critic.loss_agg_mode) == (
        0.5,
        1e-5,
        "token-mean",
    )
    assert (config.algorithm.gamma, config.algorithm.lam, config.algorithm.adv_estimator) == (1.0, 1.0, "gae")
    assert (own.rollout.temperature, config.val_temperature, own.rollout.val_kwargs.n) == (1.0, 0.0, 1)
    assert (config.trainer.total_epochs, config.trainer.save_freq, config.trainer.balance_batch) == (30, -1, True)
    assert (config.policy_role, config.rollout_role) == ("actor_rollout", "actor_rollout")
    assert config.algorithm.rollout_correction.bypass_mode is False


def test_batch_sizes_count_prompts_and_micro_batches_count_sequences() -> None:
    epochs = ["trainer.total_epochs=3", "actor_rollout_ref.actor.ppo_epochs=2", "critic.ppo_mini_batch_size=32"]
    config = small(*epochs, "actor_rollout_ref.actor.optim.lr_warmup_steps=3")
    # Three epochs of 150 prompts are 450: 7 steps of 64, and 2 prompts.
    assert config.steps(150) == 7
    facts = [
        "7 steps",
        "64 prompts",
        "8 responses",
        "512 sequences",
        "8 optimizer steps",
        "16 prompts",
        "128 sequences",
    ]
    facts += ["at most 4 sequences", "1 processes", "last 2", "450 prompts"]
    assert re.search(says(*facts), config.arithmetic(150))
    assert (config.minibatch_sequences("actor"), config.minibatch_sequences("critic")) == (128, 256)
    assert (config.engine("actor", 6).total_steps, config.engine("critic", 6).total_steps) == (6 * 2 * 4, 6 * 2 * 2)
    # The warm-up counts steps of the run: 3 of 8 optimizer steps.
    engine = config.engine("actor", 6)
    assert engine.learning_rate_at(0) == pytest.approx(1e-6 / 24)
    assert engine.learning_rate_at(22) < engine.learning_rate_at(23) == engine.learning_rate_at(24) == 1e-6
    limited = small(*epochs, "trainer.total_training_steps=5")
    assert (limited.steps(150), limited.steps_of(10_000, done=2)) == (5, 3)


def test_rejection_bounds_are_of_the_policys_probability_over_the_engines() -> None:
    prefix = "algorithm.rollout_correction"
    config = small(f"{prefix}.rollout_rs=token_k1, seq_mean_k3", f"{prefix}.rollout_rs_threshold=0.5_4.0, 0.1")
    # verl bounds the inverse ratio: 0.5 to 4 of it is 1/4 to 2 of this.
    assert config.algorithm.rollout_correction.rejections == [
        ("token", "k1", 0.25, 2.0),
        ("seq_mean", "k3", None, 0.1),
    ]
    one = small(f"{prefix}.rollout_rs=seq_sum_k1", f"{prefix}.rollout_rs_threshold=4.0").algorithm.rollout_correction
    assert one.rejections == [("seq_sum", "k1", 0.25, 4.0)]
    icepop = small(f"{prefix}.rollout_is=token", f"{prefix}.rollout_is_threshold=0.5_5.0")
    assert icepop.algorithm.rollout_correction.weight_bounds == (0.5, 5.0, "zero")
    preset = small(f"{prefix}.preset=decoupled_seq_is_rs", f"{prefix}.rollout_is_threshold=3").algorithm
    assert (preset.rollout_correction.rollout_is, preset.rollout_correction.weight_bounds) == (
        "sequence",
        (0.0, 3.0, "clamp"),
    )
    assert preset.rollout_correction.rejections == [("seq_sum", "k1", 0.5, 2.0)]
    assert small(f"{prefix}.preset=bypass_ppo_clip").algorithm.rollout_correction.bypass_mode is True


def test_a_run_goes_on_as_resume_mode_says_unless_resume_does() -> None:
    assert small().resume == "auto"
    assert small("trainer.resume_mode=disable").resume == "none"
    path = ["trainer.resume_mode=resume_path", "trainer.resume_from_path=a/step_3"]
    assert small(*path).resume == "a/step_3"
    assert small(*path, "resume=none").resume == "none"


def test_nulls_quotes_and_newer_names_mean_what_they_mean_in_verl(tmp_path: Path) -> None:
    config = small(
        "trainer.max_actor_ckpt_to_keep=null",
        "critic.ppo_mini_batch_size=null",
        f"{A}.optim.lr_warmup_steps=null",
        f"{A}.optim.lr_warmup_steps_ratio=0.5",
        "algorithm.rollout_correction.rollout_is_threshold=null",
        "trainer.experiment_name='abc'",
        f'{A}.policy_loss.loss_mode="gspo"',
        "trainer.project_name='a','b'",
        "+reward.custom_reward_function.reward_kwargs.scale=2",
        "+reward.reward_kwargs.max_resp_len=9",
        "actor_rollout_ref.model.use_rmpad=false",
    )
    assert (config.trainer.max_actor_ckpt_to_keep, config.critic.ppo_mini_batch_size) == (2**62, 16)
    assert config.engine("actor", 10).lr_warmup_ratio == 0.5
    assert config.algorithm.rollout_correction.weight_bounds == (0.0, 2.0, "clamp")
    assert (config.trainer.experiment_name, config.trainer.project_name) == ("abc", "'a','b'")
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "gspo"
    assert config.custom_reward_function.reward_kwargs == {"scale": 2}
    assert config.reward_model.reward_kwargs == {"max_resp_len": 9}
    assert not config.engine("actor", 1).packing
    (tmp_path / "c.yaml").write_text("trainer: {device: cuda}\nray_init.num_cpus: 8\n")
    for form in ([f"--config={tmp_path}/c.yaml"], ["--config", f"{tmp_path}/c.yaml"]):
        assert re.search(says("trainer.device", "ray_init.num_cpus"), idle_notes(form)[0])


@pytest.mark.parametrize(
    ("options", "on_cpus", "on_gpus"),
    [
        ([], "fp32", "bf16"),
        (["model_dtype=float32"], "fp32", "bf16_autocast"),
        (["model_dtype=fp32", "dtype=bfloat16"], "fp32", "bf16_autocast"),
        (["model_dtype=fp32", "dtype=float32"], "fp32", "fp32"),
        (["model_dtype=bfloat16"], "bf16", "bf16"),
    ],
)
def test_fp32_is_float32_weights_whose_products_are_in_bfloat16_on_gpus(
    options: list[str], on_cpus: str, on_gpus: str
) -> None:
    for gpus, precision in ((0, on_cpus), (8, on_gpus)):
        config = small(*(f"{A}.fsdp_config.{option}" for option in options))
        config.actor_rollout_ref.actor.fsdp_config.choose(gpus)
        assert config.engine("actor", 1).precision == precision
        assert config.dtype == ("float32" if precision == "fp32" else "bfloat16")


def test_pools_say_how_many_machines_there_are() -> None:
    spec = "trainer.resource_pool_spec={global_pool: [2, 2], other: [1]}"
    assert (small(spec).trainer.nnodes, small(spec, "trainer.nnodes=3").trainer.nnodes) == (2, 3)


def test_options_that_others_make_idle_are_named() -> None:
    named = """
        actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.gpu_memory_utilization=0.6
        actor_rollout_ref.rollout.enforce_eager=true actor_rollout_ref.rollout.max_model_len=99
        actor_rollout_ref.rollout.val_kwargs.temperature=0.6 actor_rollout_ref.model.lora_alpha=8
        actor_rollout_ref.actor.clip_ratio=0.3 actor_rollout_ref.actor.clip_ratio_low=0.2
        actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.data_loader_seed=1
        algorithm.adv_estimator=grpo algorithm.gamma=0.9 algorithm.lam=0.9 algorithm.kl_ctrl.kl_coef=0.1
        algorithm.rollout_correction.rollout_rs_threshold=2 critic.optim.lr=1e-5 data.val_files=task:sort
        trainer.n_gpus_per_node=1 trainer.resource_pool_spec={global_pool: [1]}
    """
    arguments = [word.strip() for word in re.split(r"\s+(?=\w+\.)", named.strip())]
    notes = small(*arguments).notes(given_options(VerlPPOConfig, arguments))
    names = [name for note in notes for name in note.removeprefix("no effect of ").split(": ")[0].split(", ")]
    assert sorted(names) == sorted(
        f"{prefix}.{name}"
        for prefix, own in {
            R: "gpu_memory_utilization enforce_eager max_model_len val_kwargs.temperature",
            A: "clip_ratio data_loader_seed",
            "actor_rollout_ref.model": "lora_alpha",
            "algorithm": "gamma lam kl_ctrl.kl_coef rollout_correction.rollout_rs_threshold",
            "critic": "optim.lr",
            "trainer": "n_gpus_per_node",
        }.items()
        for name in own.split()
    )


# --- the keys


def test_every_key_that_is_not_taken_says_why_and_no_name_has_two_meanings() -> None:
    options = {option.name for option in options_of(VerlPPOConfig)}
    refused = VerlPPOConfig.REFUSED
    assert [name for name, one in refused.items() if len(one.why) < 10] == []
    assert len(refused) == sum(len(entry["keys"]) for part in ("idle", "refused") for entry in KEYS[part])
    assert options & set(refused) == set()
    assert set(KEYS["aliases"]) & (options | set(refused)) == set()
    assert set(KEYS["aliases"].values()) <= options
    assert set(KEYS["other_defaults"]) | {key for keys in KEYS["at_least"].values() for key in keys} <= options
    assert [
        own for own in KEYS["ours"] if not any(f"{name}.".startswith(f"{own.rstrip('.')}.") for name in options)
    ] == []


@pytest.mark.parametrize(
    ("argument", "facts"),
    [
        ("critic.ppo_micro_batch_size=4", ["critic.ppo_micro_batch_size", "_per_gpu"]),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", ["ulysses_sequence_parallel_size"]),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", ["megatron", "fsdp2"]),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", ["multi_turn.enable", "agent.func_path"]),
        ("+reward_model.overlong_buffer.enable=True", ["overlong_buffer", "reward_model.reward_manager=dapo"]),
        ("trainer.default_hdfs_dir=hdfs://a", ["default_hdfs_dir", "trainer.default_local_dir"]),
        ("+actor_rollout_ref.model.override_config.attention_dropout=0.", ["override_config", "config.json"]),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=32", ["rollout.engine_kwargs"]),
        ("actor_rollout_ref.rollout.val_kwargs.top_p=0.7", ["rollout.val_kwargs.top_p"]),
        ("actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=bf16", ["mixed_precision", "fp32"]),
        ("actor_rollout_ref.actor.no_such_key=1", ["'actor_rollout_ref.actor.no_such_key'"]),
        ("~critic", ["~critic"]),
        ("--config-name=ppo_trainer", ["--config-name", "--config FILE"]),
    ],
)
def test_a_key_that_is_not_taken_says_what_to_use(argument: str, facts: list[str]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)):
        small(argument)


def test_values_that_ask_for_what_happens_anyway_are_let_through() -> None:
    refused = [(key, entry["harmless"]) for entry in KEYS["refused"] if "harmless" in entry for key in entry["keys"]]
    idle = [(key, "anything") for entry in KEYS["idle"] for key in entry["keys"]]
    arguments = [f"{key}={value}" for key, value in refused + idle]
    assert small(*arguments) == small()
    assert sum(note.count(", ") + 1 for note in idle_notes([f"{key}=1" for key, _ in idle])) >= len(idle)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ([f"{A}.ppo_mini_batch_size=24"], [f"{A}.ppo_mini_batch_size=24", "data.train_batch_size=64"]),
        (["critic.ppo_mini_batch_size=24"], ["critic.ppo_mini_batch_size=24", "data.train_batch_size=64"]),
        (
            [f"{A}.ppo_micro_batch_size_per_gpu=null"],
            [f"{A}.ppo_micro_batch_size_per_gpu", f"{A}.use_dynamic_bsz=true"],
        ),
        ([f"{A}.ppo_epochs=0"], [f"{A}.ppo_epochs=0"]),
        (["trainer.n_gpus_per_node=200"], ["200 processes"]),
        (["algorithm.adv_estimator=grpo", f"{R}.n=1"], ["grpo", f"{R}.n=1"]),
        (["algorithm.adv_estimator=optimal_token_baseline"], ["optimal_token_baseline", "opo"]),
        ([f"{A}.policy_loss.loss_mode=dro"], ["loss_mode=dro", "vanilla"]),
        ([f"{A}.loss_agg_mode=token-sum"], ["loss_agg_mode=token-sum", "seq-mean-token-sum"]),
        (["reward_model.reward_manager=prime"], ["reward_manager=prime", "naive"]),
        (["critic.loss_agg_mode=mean"], ["critic.loss_agg_mode=mean", "token-mean"]),
        (["critic.cliprange_value=0"], ["critic.cliprange_value=0"]),
        (["critic.ppo_mini_batch_size=many"], ["critic.ppo_mini_batch_size=many"]),
        (["trainer.n_gpus_per_node=65", "algorithm.adv_estimator=remax"], [64, 65]),
        (["trainer.n_gpus_per_node=9", "algorithm.filter_groups.enable=true"], ["rollout.n", 8, 9]),
        ([*APART, "trainer.resource_pool_spec={train: [1], sample: [513]}"], ["rollout", 513, 512]),
        (
            ["trainer.nnodes=3", "trainer.resource_pool_spec={global_pool: [1, 1]}"],
            ["trainer.nnodes=3", "resource_pool_spec", 2],
        ),
        ([f"{A}.fsdp_config.model_dtype=bf16", f"{A}.fsdp_config.dtype=float32"], ["model_dtype=fp32", "float32"]),
        (["algorithm.adv_estimator=gdpo"], ["gdpo", "algorithm.gdpo_reward_keys"]),
        (["critic.enable=False"], ["critic.enable=false", "adv_estimator=gae"]),
        ([f"{A}.strategy=megatron"], ["megatron", f"{A}.strategy=fsdp2"]),
        ([f"{A}.strategy=fsdp2"], [f"{A}.strategy=fsdp2", "critic.strategy=fsdp"]),
        ([f"{R}.name=sglang"], [f"{R}.name=sglang", "vllm", "hf"]),
        ([f"{R}.temperature=0"], [f"{R}.temperature=0.0"]),
        ([f"{R}.val_kwargs.n=4"], [f"{R}.val_kwargs.n=4", "do_sample=true"]),
        ([f"{A}.kl_loss_type=full"], ["full", "kl"]),
        ([f"{A}.clip_ratio=1.5"], ["clip", 1.5]),
        (
            ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100"],
            ["algorithm.kl_ctrl", "horizon=100"],
        ),
        (
            ["algorithm.rollout_correction.bypass_mode=true", "algorithm.rollout_correction.rollout_is=token"],
            ["bypass_mode", "rollout_is"],
        ),
        (["algorithm.rollout_correction.rollout_rs=seq_mean_k2"], ["rollout_rs", "rollout_rs_threshold"]),
        (
            [f"algorithm.rollout_correction.rollout_rs{rest}" for rest in ("=seq_max_k2", "_threshold=1")],
            ["rollout_rs=seq_max_k2"],
        ),
        (["trainer.logger=[console,mlflow]"], ["trainer.logger", "mlflow", "tensorboard"]),
        (["reward_model.enable=True"], ["reward_model.enable", "reward_model.model.path"]),
        (["trainer.resume_mode=resume_path"], ["trainer.resume_mode=resume_path", "trainer.resume_from_path"]),
        (["trainer.val_only=true", "data.val_files=null"], ["trainer.val_only", "data.val_files"]),
        (["async_train=true"], ["async", "actor_rollout_ref.hybrid_engine=false"]),
        (["trainer.role_mapping={actor_rollout: global_pool}"], ["role_mapping", "critic"]),
        (["trainer.role_mapping={actor: global_pool, critic: global_pool}"], ["role_mapping", "rollout"]),
        (
            ["trainer.role_mapping={actor_rollout: a, critic: a}"],
            ["resource_pool_spec", "global_pool"],
        ),
        (["trainer.resource_pool_spec={global_pool: [2, 1]}"], ["resource_pool_spec", "[2, 1]"]),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_set(options: list[str], facts: list[object]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)):
        small(*options)


# --- roles and pools


def test_roles_are_called_as_in_verl_and_their_pools_count_processes() -> None:
    assert [str(role) for role in Role] == [
        "actor",
        "rollout",
        "actor_rollout",
        "critic",
        "ref",
        "rm",
        "actor_rollout_ref",
    ]
    manager = ResourcePoolManager({"a": [4, 4], "b": [2]}, {Role.ActorRollout: "a", Role.RefPolicy: "a", "judge": "b"})
    assert (manager.workers("ref"), manager.nodes("ref"), manager.workers("judge"), manager.get_n_gpus()) == (
        8,
        2,
        2,
        10,
    )
    assert manager.roles_of("a") == ["actor_rollout", "ref"]
    assert (manager.holder("actor"), manager.holder("rollout"), manager.holder("ref")) == ("actor_rollout",) * 2 + (
        "ref",
    )


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What `--dry_run` prints."""
    assert main([*SMALL, *arguments, "--dry_run"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_roles_of_one_pool_become_a_job_and_share_processes_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "algorithm.use_kl_in_reward=true")
    kinds = {name: (role["kind"], role["nproc_per_node"]) for name, role in plan["roles"].items()}
    assert kinds == {
        "TRAINER": ("run", 1),
        "ACTOR_ROLLOUT": ("train", 1),
        "CRITIC": ("train", 1),
        "REF": ("run", 1),
    }
    assert plan["roles"]["REF"]["entrypoint"] == "recipes.verl_ppo.roles.actor_rollout_ref:ActorRolloutRefWorker"
    assert len(plan["placement"]["hosts"]) == 4
    shared = planned(capsys, "algorithm.use_kl_in_reward=true", "trainer.share_processes=true")
    assert [worker for host in shared["placement"]["hosts"][1:] for worker in host["workers"]] == [
        ["ACTOR_ROLLOUT", 0],
        ["CRITIC", 0],
        ["REF", 0],
    ]
    assert len(shared["placement"]["hosts"]) == 2


def test_roles_of_several_pools_are_apart(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(
        capsys,
        "+trainer.resource_pool_spec.train=[2]",
        "+trainer.resource_pool_spec.sample=[1]",
        "trainer.role_mapping={actor:train,critic:train,rollout:sample}",
        "async_train=true",
        "actor_rollout_ref.hybrid_engine=False",
    )
    assert {name: role["nproc_per_node"] for name, role in plan["roles"].items()} == {
        "TRAINER": 1,
        "ACTOR": 2,
        "CRITIC": 2,
        "ROLLOUT": 1,
    }
    assert plan["roles"]["ROLLOUT"]["kind"] == "run"


def test_a_printed_configuration_is_read_back_as_it_was(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["critic.optim.lr=3e-5", "trainer.role_mapping={actor_rollout: global_pool, critic: global_pool}"]
    assert main([*SMALL, *options, "--print_config"]) == 0
    (tmp_path / "c.yaml").write_text(capsys.readouterr().out)
    assert read(f"--config={tmp_path / 'c.yaml'}") == small(*options)


def test_the_demonstration_becomes_grpo_by_one_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithm.adv_estimator=grpo", "--dry_run"]) == 0
    assert list(json.loads(capsys.readouterr().out)["roles"]) == ["TRAINER", "ACTOR_ROLLOUT"]


# --- the page


def test_the_page_from_verl_is_what_the_schema_says_and_names_every_key() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "migration_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    page = (ROOT / "docs" / "from_verl.md").read_text()
    named = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`[^|]*)\|", page, re.MULTILINE)))
    assert sorted(named) == sorted([*(option.name for option in options_of(VerlPPOConfig)), *VerlPPOConfig.REFUSED])
