"""Keys of verl that affect results have the meaning of verl 0.9.1, or the start of a run reports the difference."""

import re
from pathlib import Path

import pytest

from plugins.vllm_arguments import table
from recipes.verl_ppo.adapter import VERL, plain_arguments
from recipes.verl_ppo.config import VerlPPOConfig
from recipes.verl_ppo.main import main
from tests.messages import says
from tests.recipes.verl_commands import SMALL
from training.options.config import CommandLine, load_config
from training.options.schema import ConfigError, fields_of


def small(*arguments: str) -> VerlPPOConfig:
    """Return the configuration of a small command with these additional arguments."""
    return load_config(VerlPPOConfig, plain_arguments([*SMALL, *arguments]))


LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"


@pytest.mark.parametrize("kind", ["gspo", "sapo", "geo_mean"])
def test_sequence_level_losses_are_means_over_responses_as_in_verl(kind: str) -> None:
    line = CommandLine(VerlPPOConfig, [*SMALL, f"{LOSS}={kind}"])
    algorithm = line.config().algorithm
    assert (algorithm.policy_aggregation, algorithm.loss_aggregation) == ("seq-mean-token-mean", "token-mean")
    assert any(re.search(says(f"loss_mode={kind}", "loss_agg_mode", "entropy and KL"), note) for note in line.notes)
    same = CommandLine(
        VerlPPOConfig, [*SMALL, f"{LOSS}={kind}", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"]
    )
    assert same.config().algorithm.policy_aggregation == "seq-mean-token-mean"
    assert not any("loss_mode" in note for note in same.notes)
    # With the recipe's own names the choice is free.
    assert (
        load_config(
            VerlPPOConfig, ["model.path=m", "data.path=d", "algorithm.policy_loss=gspo"]
        ).algorithm.policy_aggregation
        is None
    )


@pytest.mark.parametrize(("kind", "loss"), [("", "ppo"), ("ppo_clip", "ppo"), ("reinforce", "reinforce")])
def test_bypass_mode_uses_the_loss_of_rollout_correction_as_in_verl(kind: str, loss: str) -> None:
    group = "algorithm.rollout_correction"
    keys = [f"{group}.bypass_mode=true", *([f"{group}.loss_type={kind}"] if kind else [])]
    line = CommandLine(VerlPPOConfig, [*SMALL, *keys, f"{LOSS}=gspo"])
    algorithm = line.config().algorithm
    assert (algorithm.policy_loss, algorithm.policy_aggregation) == (loss, None)
    assert any(re.search(says("no effect", "loss_mode=gspo", "bypass_mode"), note) for note in line.notes)
    plain = CommandLine(VerlPPOConfig, [*SMALL, *keys])
    assert plain.config().algorithm.policy_loss == loss
    assert not any("loss_mode" in note for note in plain.notes)


@pytest.mark.parametrize(("owner", "group"), [("actor_rollout_ref.actor", "train"), ("critic", "critic")])
def test_the_gradient_limit_is_that_of_the_optimizer_with_grad_clip_as_fallback(owner: str, group: str) -> None:
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


def test_the_optimal_token_baseline_with_an_environment_notes_the_difference() -> None:
    keys = ["algorithm.adv_estimator=optimal_token_baseline", "agent.func_path=env:guess"]
    line = CommandLine(VerlPPOConfig, [*SMALL, *keys])
    assert any("tir_optimal_token_baseline" in note for note in line.notes)
    assert not any("tir_optimal" in note for note in CommandLine(VerlPPOConfig, [*SMALL, keys[0]]).notes)


def test_actor_and_critic_must_use_the_same_engine() -> None:
    for actor, critic in (("fsdp", "megatron"), ("megatron", "fsdp2")):
        keys = [f"actor_rollout_ref.actor.strategy={actor}", f"critic.strategy={critic}"]
        with pytest.raises(ConfigError, match=says(f"actor.strategy={actor}", f"critic.strategy={critic}")):
            small(*keys)
    assert small("actor_rollout_ref.actor.strategy=fsdp2", "critic.strategy=fsdp").train.engine == "fsdp"


def test_old_keys_of_the_entropy_recipe_have_the_same_meaning() -> None:
    actor = "actor_rollout_ref.actor"
    old = small(
        f"{actor}.loss_mode=clip_cov",
        f"{actor}.clip_cov_ratio=0.01",
        f"{actor}.clip_cov_lb=2",
        f"{actor}.clip_cov_ub=4",
    )
    algorithm = old.algorithm
    assert (algorithm.policy_loss, algorithm.cov_share, algorithm.cov_low, algorithm.cov_high) == (
        "clip_cov",
        0.01,
        2.0,
        4.0,
    )
    kl = small(f"{actor}.loss_mode=kl_cov", f"{actor}.k_percent=0.2", f"{actor}.ppo_kl_coef=0.5").algorithm
    assert (kl.policy_loss, kl.cov_share, kl.kl_cov_coef) == ("kl_cov", 0.002, 0.5)


@pytest.mark.parametrize(("key", "aggregation"), [("True", "token-mean"), ("False", "seq-mean-token-mean")])
def test_the_switch_of_the_early_dapo_recipe_selects_a_loss_aggregation(key: str, aggregation: str) -> None:
    read = small(f"actor_rollout_ref.actor.use_token_level_loss={key}")
    assert read.algorithm.loss_aggregation == aggregation


@pytest.mark.parametrize(
    ("name", "facts"),
    [("quantization=fp8", ["quantization", "weights"]), ("kv_cache_dtype=fp8", ["kv_cache_dtype", "=tis"]),
     ("logprobs_mode=raw_logprobs", ["logprobs_mode", "processed_logprobs"])],
)  # fmt: skip
def test_vllm_arguments_that_change_logprobs_are_rejected_by_name(name: str, facts: list[str]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)):
        small(f"+actor_rollout_ref.rollout.engine_kwargs.vllm.{name}")


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.cpu_offload_gb=4", ["cpu_offload_gb", "hf generates"]),
        ("data.response_key=x", ["response_key"]),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.method=ngram", ["speculat", "speed"]),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.disable_custom_all_reduce=true", ["disable_custom_all_reduce"]),
    ],
)
def test_accepted_keys_without_effect_are_named(key: str, facts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, key, "--print_config"]) == 0
    assert re.search(says("no effect", *facts), capsys.readouterr().err)


def test_vllm_arguments_set_the_corresponding_options() -> None:
    engine = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    rollout = small(f"{engine}.enforce_eager=true", f"{engine}.gpu_memory_utilization=0.3").rollout
    assert (rollout.enforce_eager, rollout.gpu_memory) == (True, 0.3)
    options = ("block_size=32", "compilation_config.cudagraph_mode=NONE", "max_num_batched_tokens=8192")
    assert small(*(f"{engine}.{option}" for option in options)).rollout.vllm == {
        "block_size": 32,
        "compilation_config": {"cudagraph_mode": "NONE"},
        "max_num_batched_tokens": 8192,
    }
    with pytest.raises(ConfigError, match=says(f"{engine}.kv_cache_dtype")):
        small(f"{engine}.kv_cache_dtype=fp8")


def test_num_examine_is_accepted_and_the_error_for_a_misspelt_key_gives_the_nearest() -> None:
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
def test_arguments_of_the_chat_template_are_accepted(key: str) -> None:
    assert small(key).model.template_arguments == {"enable_thinking": False}


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.rollout.repetition_penalty=1.0",
        "actor_rollout_ref.rollout.use_fire_sampling=False",
        "actor_rollout_ref.rollout.min_p=0.0",
    ],
)
def test_values_equal_to_the_behaviour_are_accepted_without_a_note(key: str) -> None:
    line = CommandLine(VerlPPOConfig, [*SMALL, key])
    line.config()
    assert not any(key.rpartition(".")[2].partition("=")[0] in note for note in line.notes)
    other = {"1.0": "1.2", "False": "True", "0.0": "0.1"}[key.partition("=")[2]]
    with pytest.raises(ConfigError, match=says(key.partition("=")[0])):
        small(f"{key.partition('=')[0]}={other}")


def test_rejection_options_of_verl_0_7_invert_the_bounds() -> None:
    group = "algorithm.rollout_correction"
    for level, rule in (("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")):
        bounds = [f"{group}.rollout_rs_threshold=4.0", f"{group}.rollout_rs_threshold_lower=0.5"]
        algorithm = small(f"{group}.rollout_rs={level}", *bounds).algorithm
        assert algorithm.rejection == rule
        # The policy's probability over the engine's is bounded by 1/2 and 4, so the engine's over the policy's by 1/4
        # and 2.
        assert algorithm.rejection_threshold == "0.25_2.0"


@pytest.mark.parametrize(
    ("keys", "temperature", "samples"),
    [
        (["temperature=0.7", "n=4"], 0.7, 4),  # as read by releases since 0.7
        (["temperature=0.7", "n=4", "do_sample=false"], 0.0, 1),
        (["temperature=0.7", "n=4", "do_sample=true", "mode=sync"], 0.7, 4),
        (["temperature=0.7", "n=4", "do_sample=false", "mode=async"], 0.7, 4),
        (["temperature=0.7", "n=4", "mode=sync"], 0.0, 1),
        (["n=4"], 0.0, 1),
    ],
)
def test_server_engines_validate_at_the_temperature_regardless_of_do_sample(
    keys: list[str], temperature: float, samples: int
) -> None:
    rollout = "actor_rollout_ref.rollout"
    words = [f"{rollout}.{key}" if key.startswith("mode") else f"{rollout}.val_kwargs.{key}" for key in keys]
    evaluation = small(*words, "data.val_files=task:sort").evaluation
    assert (evaluation.temperature, evaluation.samples_per_prompt) == (temperature, samples)


def test_an_engine_across_machines_is_reduced_to_the_devices_of_one_machine() -> None:
    keys = ["actor_rollout_ref.rollout.tensor_model_parallel_size=16", "trainer.nnodes=4", "trainer.n_gpus_per_node=8"]
    line = CommandLine(VerlPPOConfig, [*SMALL, *keys])
    assert line.config().rollout.tensor_parallel == 8
    assert any(re.search(says("tensor_model_parallel_size=16", "on one node", "2 times"), note) for note in line.notes)
    assert small(*keys[1:], "actor_rollout_ref.rollout.tensor_model_parallel_size=12").rollout.tensor_parallel == 12


@pytest.mark.parametrize("axis", ["tensor_model_parallel_size", "expert_model_parallel_size"])
def test_tensor_and_expert_axes_have_no_effect_with_adapters(axis: str) -> None:
    keys = ["actor_rollout_ref.actor.strategy=megatron", "critic.strategy=megatron", "trainer.n_gpus_per_node=8"]
    keys += [f"actor_rollout_ref.actor.megatron.{axis}=4", "actor_rollout_ref.model.lora.rank=8"]
    line = CommandLine(VerlPPOConfig, [*SMALL, *keys])
    config = line.config()
    assert (config.parallel.tensor, config.parallel.expert, config.train.lora_rank) == (1, 1, 8)
    assert any(re.search(says("no effect", f"{axis}=4", "adapters"), note) for note in line.notes)


@pytest.mark.parametrize("group", ["reward.reward_model", "reward_model"])
def test_a_function_beside_a_served_reward_model_gives_the_reward_alone(group: str, tmp_path: Path) -> None:
    path = tmp_path / "score.py"
    path.write_text("def compute_score(data_source, solution_str, reward_router_address, **_):\n    return 0.0\n")
    model = "model_path" if group.startswith("reward.") else "model.path"
    keys = [f"{group}.enable=true", f"{group}.{model}=judge", f"{group}.rollout.name=vllm"]
    keys += [f"{group}.enable_resource_pool=true", f"{group}.nnodes=1", "custom_reward_function.name=compute_score"]
    keys += [f"custom_reward_function.path={path}", "+custom_reward_function.reward_kwargs.reward_router_address=h:1"]
    line = CommandLine(VerlPPOConfig, plain_arguments([*SMALL, *keys]))
    config = line.config()
    assert (config.reward.model_path, config.reward.source) == ("", str(path))
    assert config.reward.arguments == {"reward_router_address": "h:1"}
    assert "rm" not in config.roles
    assert any(re.search(says("no effect of reward_model", "vllm serve"), note) for note in line.notes)


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        ("reward_model.reward_manager=generative", ["reward_manager=generative", "custom_reward_function.path"]),
        ("actor_rollout_ref.rollout.quantization.weight_dtype=fp8", ["quantization.weight_dtype", "weights"]),
        ("data.filter_accuracy=true", ["data.filter_accuracy", "filter_groups.enable"]),
        ("reward_model.model.beta_train=0.05", ["beta_train", "custom_reward_function.path"]),
    ],
)
def test_keys_of_other_recipes_are_rejected_with_the_alternative(key: str, facts: list[str]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)):
        small(key)


def test_data_keys_are_passed_to_a_dataset_class_and_also_apply_to_the_recipe(tmp_path: Path) -> None:
    keys = ["data.custom_cls.path=own.py", "data.custom_cls.name=Own", "+data.strategy=x", "+data.own.depth=3"]
    loaded = small(*keys, "data.max_prompt_length=99", "data.return_raw_chat=true", "data.prompt_key=question")
    config = loaded.class_config()
    assert (loaded.data.class_path, loaded.data.class_name, loaded.data.max_prompt_tokens) == ("own.py", "Own", 99)
    assert (config["strategy"], config["own"], config["return_raw_chat"]) == ("x", {"depth": 3}, True)
    assert (config["max_prompt_length"], config["prompt_key"], config["truncation"]) == (99, "question", "error")
    (tmp_path / "c.yaml").write_text("data: {custom_cls: {path: own.py, name: Own}, own: {depth: 4}, image_key: null}")
    assert small(f"--config={tmp_path}/c.yaml").class_config()["own"] == {"depth": 4}
    with pytest.raises(ConfigError, match=says("unknown option", "data.own.depth")):
        small("+data.own.depth=3")
    with pytest.raises(ConfigError, match=says("data.sampler.class_path")):
        small(*keys, "data.sampler.class_path=s.py")


def test_rows_of_a_dataset_class_are_trained_on(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "class Own:\n"
        "    def __init__(self, data_files, tokenizer, config, processor=None):\n"
        "        self.text = f'{config.greeting} {len(data_files)}'\n"
        "    def __len__(self):\n"
        "        return 4\n"
        "    def __getitem__(self, item):\n"
        "        return {'raw_prompt': [{'role': 'user', 'content': self.text}], 'data_source': 's',\n"
        "                'reward_model': {'ground_truth': item}}\n"
    )
    keys = [f"data.custom_cls.path={tmp_path}/own.py", "data.custom_cls.name=Own", "+data.greeting=hi"]
    rows = small(*keys, "data.train_files=[a.parquet,b.parquet]", "data.train_max_samples=3").rows()
    assert [row["input"] for row in rows] == [[{"role": "user", "content": "hi 2"}]] * 3
    assert {row["datasource"] for row in rows} == {"s"}


def test_agent_loops_of_a_file_run_with_the_limits_of_the_command(tmp_path: Path) -> None:
    rollout = "actor_rollout_ref.rollout"
    keys = [f"{rollout}.agent.agent_loop_config_path={tmp_path}/loops.yaml", f"{rollout}.multi_turn.max_user_turns=4"]
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": [{"role": "user", "content": "a"}], "agent_name": "mine", "data_source": "s", "reward_model": '
        '{"ground_truth": "1"}}'
    )
    config = small(*keys, f"{rollout}.agent.default_agent_loop=mine", f"data.train_files={tmp_path}/rows.jsonl")
    assert (config.has_verl_loops, config.agent.rewarded_by, config.agent.max_tokens) == (True, "reward", 1024)
    arguments = config.agent.arguments
    assert (arguments["path"], arguments["default"]) == (f"{tmp_path}/loops.yaml", "mine")
    policy = arguments["config"]["actor_rollout_ref"]["rollout"]
    assert (policy["response_length"], policy["multi_turn"]["max_user_turns"]) == (512, 4)
    (row,) = config.rows()
    assert row["extra_info"] == {"agent_name": "mine", "raw_prompt": row["input"]}
    assert small(*keys, "agent.rewarded_by=environment").agent.gives_rewards
    # With an agent of the user, or verl's tools, the file has no effect.
    line = CommandLine(VerlPPOConfig, [*SMALL, *keys, "agent.func_path=env:guess"])
    assert not line.config().has_verl_loops
    assert any(re.search(says("no effect", "agent_loop_config_path"), note) for note in line.notes)


def test_max_model_len_limits_the_sum_of_prompt_and_response() -> None:
    key = "actor_rollout_ref.rollout.max_model_len"
    line = CommandLine(VerlPPOConfig, [*SMALL, f"{key}=600"])
    assert line.config().agent.max_tokens == 600
    assert any(re.search(says("max_model_len=600", "together", 1024), note) for note in line.notes)
    assert small(f"{key}=2000").agent.max_tokens is None


def test_adam_of_megatron_is_adamw_and_adam_of_torch_is_rejected() -> None:
    key = "actor_rollout_ref.actor.optim.optimizer"
    assert small(f"{key}=adam", "model_engine=megatron").train == small("model_engine=megatron").train
    assert small(f"{key}=AdamW").train == small().train
    for engine, name in (([], "adam"), (["model_engine=megatron"], "sgd")):
        with pytest.raises(ConfigError, match=says(f"{key}={name}", "AdamW")):
            small(*engine, f"{key}={name}")
    assert small("actor_rollout_ref.actor.optim.lr_decay_style=linear").train.lr_scheduler == "linear"


def test_lora_alpha_may_be_0_without_adapters() -> None:
    assert small("actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.lora_alpha=0").train.lora_rank == 0
    with pytest.raises(ConfigError, match=says("lora_alpha")):
        small("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=0")


def test_the_critic_uses_the_attention_kernels_of_the_policy() -> None:
    line = CommandLine(VerlPPOConfig, [*SMALL, "critic.model.override_config.attn_implementation=sdpa"])
    line.config()
    assert any(re.search(says("no effect", "attn_implementation", "critic"), note) for note in line.notes)


@pytest.mark.parametrize(
    "short", [["-cn", "ppo_megatron_trainer"], ["-cp", "config", "-cn", "ppo_megatron_trainer.yaml"]]
)
def test_short_options_of_hydra_are_accepted(short: list[str]) -> None:
    line = CommandLine(VerlPPOConfig, plain_arguments([*short, *SMALL]))
    line.config()
    assert any("megatron is torch's fully_shard" in note for note in line.notes)


def test_a_named_reward_model_with_a_function_is_served_separately_and_keeps_its_penalty(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("def compute_score(data_source, solution_str, **_):\n    return 0.0\n")
    model = "reward_model.reward_models.judge"
    keys = ["reward_model.enable=true", f"{model}.model.path=judge", f"{model}.rollout.name=vllm", f"{model}.nnodes=2"]
    keys += [f"{model}.reward_manager=dapo", f"+{model}.reward_kwargs.max_resp_len=512"]
    keys += [f"+{model}.reward_kwargs.overlong_buffer_cfg.{name}" for name in ("enable=true", "len=64")]
    keys += [f"custom_reward_function.path={tmp_path}/score.py"]
    line = CommandLine(VerlPPOConfig, plain_arguments([*SMALL, *keys]))
    config = line.config()
    assert (config.reward.model_path, config.algorithm.overlong_buffer) == ("", 64)
    assert any(re.search(says("no effect of reward_model", "vllm serve"), note) for note in line.notes)


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        ("actor_rollout_ref.actor.policy_loss.score_func=logL", ["score_func", "policy loss", "loss_mode"]),
        ("actor_rollout_ref.actor.policy_loss.cppo.cppo_w_min=0.8", ["cppo_w_min", "policy loss", "loss_mode"]),
        ("actor_rollout_ref.rollout.partial_rollout_max_split=4", ["unfinished responses", "partial_rollout=true"]),
        ("actor_rollout_ref.rollout.rollout_threshold_rate=0.8", ["unfinished responses", "partial_rollout=true"]),
        ("actor_rollout_ref.actor.megatron.dtype=float16", ["megatron.dtype=float16", "loss scale", "bfloat16"]),
        ("actor_rollout_ref.rollout.over_sample_rate=0.1", ["asynchronous.in_flight_prompts"]),
        ("reward_model.rm_mode=generator", ["reward_model.rm_mode", "vllm serve"]),
        ("reward_model.elliptical.sparse_dim=32", ["elliptical.sparse_dim", "custom_reward_function"]),
    ],
)
def test_keys_of_missing_parts_of_recipes_are_rejected_with_the_replacement(key: str, facts: list[str]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)):
        small(key)


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        ("mini_batch_pipeline=True", ["mini_batch_pipeline", "before it trains"]),
        ("actor_rollout_ref.ref.enable=False", ["ref.enable", "KL"]),
        ("trainer.dump_high_diff_dir=d", ["dump_high_diff_dir", "rollouts"]),
        ("actor_rollout_ref.rollout.moe_tensor_parallel_size=2", ["moe_tensor_parallel_size", "do not change"]),
        ("reward_model.sandbox_fusion_url=https://x", ["sandbox_fusion_url", "sandbox"]),
    ],
)
def test_keys_of_recipes_that_change_no_results_have_a_note(key: str, facts: list[str]) -> None:
    notes = CommandLine(VerlPPOConfig, plain_arguments([*SMALL, f"+{key}"])).notes
    assert any(re.search(says("no effect", *facts), note) for note in notes)


def test_every_unsupported_key_has_a_reason_and_every_target_option_exists() -> None:
    assert [name for name, one in VERL.refused.items() if len(one.why) < 10] == []
    # Only keys that accept any value may have no reason.
    assert {one.harmless for one in VERL.no_effect.values() if not one.why} == {"*"}
    kinds = ("allowed", "corrected")
    known = {f"rollout.vllm.{name}" for name, each in table.arguments().items() if each.kind in kinds}
    known |= set(fields_of(VerlPPOConfig))
    assert {target.name for target in VERL.options.values()} <= known
    parts = [set(part) for part in (VERL.options, VERL.computed, VERL.no_effect, VERL.refused)]
    assert sum(map(len, parts)) == len(set.union(*parts))
