"""Messages for unknown options: the right name, or the alternative."""

from __future__ import annotations

import runpy
from importlib import import_module
from pathlib import Path

import pytest

from plugins.option_help.synonyms import answer, synonyms
from recipes.grpo.config import GRPOConfig
from recipes.multi_turn.config import MultiTurnConfig
from recipes.reinforce_pp.config import ReinforceConfig
from recipes.verl_ppo.config import VerlPPOConfig
from tests.messages import says
from tests.recipe_copies import RECIPES
from training.options.adapter import WrittenOption
from training.options.config import Vocabulary, load_config
from training.options.described import options_of
from training.options.schema import ConfigError, fields_of

ROOT = Path(__file__).parents[3]

TRL = {
    "learning_rate": "train.learning_rate",
    "model_name_or_path": "model.path",
    "attn_implementation": "model.attn_implementation",
    "dtype": "train.precision",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "num_generations": "samples_per_prompt",
    "num_generations_eval": "evaluation.samples_per_prompt",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "use_vllm": "rollout.engine",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel",
    "beta": "algorithm.kl_coef",
    "num_iterations": "train.epochs",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "importance_sampling_level": "algorithm.ratio",
    "scale_rewards": "algorithm.std_norm",
    "loss_type": "algorithm.loss_aggregation",
    "max_tool_calling_iterations": "agent.max_turns",
    "environment_factory": "agent.func_path",
    "vllm_importance_sampling_correction": "algorithm.correction",
    "vllm_importance_sampling_cap": "algorithm.correction_range",
    "reward_funcs": "reward.source",
    "dataset_name": "data.path",
    "chat_template_path": "model.chat_template",
    "pad_token": "model.pad_token",
    "output_dir": "run_dir",
    "seed": "seed",
    "data_seed": "seed",
    "num_train_epochs": "data.epochs",
    "per_device_train_batch_size": "train.micro_batch_size",
    "weight_decay": "train.weight_decay",
    "adam_beta1": "train.betas",
    "adam_beta2": "train.betas",
    "adam_epsilon": "train.eps",
    "max_grad_norm": "train.max_grad_norm",
    "lr_scheduler_type": "train.lr_scheduler",
    "warmup_ratio": "train.lr_warmup_ratio",
    "warmup_steps": "train.lr_warmup_ratio",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "padding_free": "train.packing",
    "use_peft": "train.lora_rank",
    "lora_r": "train.lora_rank",
    "lora_alpha": "train.lora_alpha",
    "lora_target_modules": "train.lora_target_modules",
    "deepspeed": "train.engine",
    "fsdp": "train.engine",
    "report_to": "log.wandb",
    "run_name": "log.wandb_name",
    "project": "log.wandb_project",
    "eval_steps": "evaluation.every",
    "eval_strategy": "evaluation.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "metric_for_best_model": "evaluation.best_metric",
    "resume_from_checkpoint": "resume",
    "ddp_timeout": "stall_timeout",
}
OPENRLHF = {
    "pretrain": "model.path",
    "prompt_data": "data.path",
    "prompt_data_probs": "data.probs",
    "prompt_split": "data.split",
    "input_key": "data.prompt_key",
    "label_key": "data.label_key",
    "apply_chat_template": "data.apply_chat_template",
    "input_template": "data.input_template",
    "max_samples": "data.max_samples",
    "prompt_max_len": "data.max_prompt_tokens",
    "generate_max_len": "rollout.max_new_tokens",
    "rollout_batch_size": "prompts_per_step",
    "n_samples_per_prompt": "samples_per_prompt",
    "micro_train_batch_size": "train.micro_batch_size",
    "micro_rollout_batch_size": "train.forward_micro_batch_size",
    "train_max_tokens_per_gpu": "train.max_tokens",
    "rollout_max_tokens_per_gpu": "train.forward_max_tokens",
    "num_episodes": "data.epochs",
    "max_epochs": "train.epochs",
    "zero_stage": "train.zero_stage",
    "adam_betas": "train.betas",
    "adam_offload": "train.adam_offload",
    "l2": "train.weight_decay",
    "max_norm": "train.max_grad_norm",
    "lr_warmup_ratio": "train.lr_warmup_ratio",
    "actor_learning_rate": "train.learning_rate",
    "init_kl_coef": "algorithm.kl_coef",
    "eps_clip": "algorithm.clip_low",
    "packing_samples": "train.packing",
    "flash_attn": "model.attn_implementation",
    "enable_ema": "train.ema_beta",
    "remote_rm_url": "reward.source",
    "async_rollout": "asynchronous.enabled",
    "staleness_threshold": "asynchronous.queue_size",
    "vllm_num_engines": "placement.rollout_engines",
    "colocate_all_models": "placement.colocate",
    "actor_num_nodes": "placement.actor_nodes",
    "actor_num_gpus_per_node": "placement.actor_ranks",
    "ref_num_gpus_per_node": "placement.references",
    "enforce_eager": "rollout.enforce_eager",
    "enable_prefix_caching": "rollout.prefix_caching",
    "enable_vllm_is_correction": "algorithm.correction",
    "vllm_is_truncated_threshold": "algorithm.correction_range",
    "use_icepop": "algorithm.correction",
    "dynamic_filtering_reward_range": "algorithm.filter_range",
    "dynamic_filtering": "algorithm.filter_range",
    "eval_dataset": "evaluation.path",
    "eval_temperature": "evaluation.temperature",
    "eval_n_samples_per_prompt": "evaluation.samples_per_prompt",
    "best_metric_key": "evaluation.best_metric",
    "ckpt_path": "checkpoint.path",
    "max_ckpt_num": "checkpoint.keep",
    "max_ckpt_mem": "checkpoint.max_gb",
    "save_path": "checkpoint.export_path",
    "use_wandb": "log.wandb",
    "wandb_org": "log.wandb_org",
    "wandb_run_name": "log.wandb_name",
    "use_tensorboard": "log.tensorboard",
}
VERL = {
    "data.train_files": "data.path",
    "data.val_files": "evaluation.path",
    "data.train_batch_size": "prompts_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.train_max_samples": "data.max_samples",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.use_remove_padding": "train.packing",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "train.gradient_checkpointing",
    "actor_rollout_ref.actor.optim.lr": "train.learning_rate",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "train.mini_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "train.micro_batch_size",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "train.max_tokens",
    "actor_rollout_ref.actor.ppo_epochs": "train.epochs",
    "actor_rollout_ref.actor.grad_clip": "train.max_grad_norm",
    "actor_rollout_ref.actor.clip_ratio": "algorithm.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coef",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl_estimator",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.loss_aggregation",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "train.adam_offload",
    "actor_rollout_ref.rollout.n": "samples_per_prompt",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.max_num_seqs": "rollout.max_num_seqs",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.gpu_memory",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tensor_parallel",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "train.forward_micro_batch_size",
    "actor_rollout_ref.rollout.val_kwargs.n": "evaluation.samples_per_prompt",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "evaluation.temperature",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.std_norm",
    "algorithm.filter_groups.enable": "algorithm.filter_range",
    "reward_model.overlong_buffer.len": "algorithm.overlong_buffer",
    "custom_reward_function.path": "reward.source",
    "trainer.total_epochs": "data.epochs",
    "trainer.nnodes": "placement.nodes",
    "trainer.n_gpus_per_node": "placement.devices_per_node",
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "evaluation.every",
    "trainer.project_name": "log.wandb_project",
    "trainer.experiment_name": "log.wandb_name",
    "trainer.default_local_dir": "checkpoint.path",
    "trainer.resume_mode": "resume",
    "trainer.logger": "log.wandb",
}
COMMON = {
    "lr": "train.learning_rate",
    "train.lr": "train.learning_rate",
    "LR": "train.learning_rate",
    "actor.lr": "train.learning_rate",
    "n": "samples_per_prompt",
    "group_size": "samples_per_prompt",
    "rollouts_per_prompt": "samples_per_prompt",
    "temp": "rollout.temperature",
    "rollout.temp": "rollout.temperature",
    "evaluation.temp": "evaluation.temperature",
    "max_tokens": "rollout.max_new_tokens",
    "rollout.max_tokens": "rollout.max_new_tokens",
    "max_new_tokens": "rollout.max_new_tokens",
    "tp": "rollout.tensor_parallel",
    "ring_attn_size": "parallel.context",
    "ulysses_sequence_parallel_size": "parallel.context",
    "wd": "train.weight_decay",
    "grad_clip": "train.max_grad_norm",
    "clip": "algorithm.clip_low",
    "model": "model.path",
    "data": "data.path",
    "dataset": "data.path",
    "reward": "reward.source",
    "reward_fn": "reward.source",
    "rollout": "rollout.engine",
    "agent": "agent.func_path",
    "env": "agent.func_path",
    "tokenizer": "model.tokenizer_path",
    "rope_scaling": "model.config_overrides",
    "gpus": "placement.devices_per_node",
    "nodes": "placement.nodes",
    "ref": "model.path",
    "micro_bs": "train.micro_batch_size",
    "entity": "log.wandb_org",
    "num_generation": "samples_per_prompt",
    "lora": "train.lora_rank",
    # Former names of options.
    "train.max_norm": "train.max_grad_norm",
    "data.passes": "data.epochs",
    "data.max_rows": "data.max_samples",
    "rollout.max_rows": "rollout.max_num_seqs",
    "placement.collocate": "placement.colocate",
    "minibatches": "train.mini_batch_size",
}
INSTEAD = {
    "batch_size": ["prompts_per_step", "train.mini_batch_size"],
    "bs": ["prompts_per_step", "train.mini_batch_size"],
    "train.batch_size": ["prompts_per_step", "train.mini_batch_size"],
    "train_batch_size": ["prompts_per_step", "train.mini_batch_size"],
    "epochs": ["data.epochs", "train.epochs"],
    "max_length": ["data.max_prompt_tokens", "rollout.max_new_tokens"],
    "gradient_accumulation_steps": ["train.mini_batch_size", "train.max_tokens"],
    "grad_accum": ["train.mini_batch_size", "train.max_tokens"],
    "use_kl_loss": ["algorithm.kl_coef"],
    "sync_ref_model": ["reference"],
    "optim": ["AdamW", "train.betas"],
    "repetition_penalty": ["rollout.temperature"],
    "min_p": ["rollout.temperature"],
    "vllm_mode": ["placement.colocate"],
    "logging_steps": ["metrics.jsonl"],
    "num_workers": ["leave it out"],
    "shuffle": ["seed"],
    "push_to_hub": ["checkpoint.export_path"],
    "load_in_4bit": ["train.lora_rank"],
    "use_liger_kernel": ["train.packing"],
    "pp_size": ["parallel.context", "train.zero_stage=3"],
    "system_prompt": ["chat messages"],
    "eval_batch_size": ["leave it out"],
    "reward_weights": ["reward.source"],
    "path": ["model.path", "data.path"],
    "engine": ["rollout.engine", "train.engine"],
}
ELSEWHERE = {
    "critic.path": ["critic", "openrlhf_ppo", "verl_ppo"],
    "critic.lr": ["critic", "openrlhf_ppo", "verl_ppo"],
    "gae_lambda": ["algorithm.lam", "openrlhf_ppo", "verl_ppo"],
    "lam": ["algorithm.lam", "openrlhf_ppo", "verl_ppo"],
    "algorithm.gamma": ["reinforce_pp", "openrlhf_ppo"],
    "entropy_coef": ["algorithm.entropy_coef", "openrlhf_ppo"],
    "adv_estimator": ["algorithm.estimator", "multi_turn"],
    "chosen_key": ["data.chosen_key", "dpo", "reward_model"],
    "rejected_column": ["data.rejected_key", "dpo", "reward_model"],
    "label_smoothing": ["algorithm.label_smoothing", "dpo"],
    "reward_pretrain": ["reward_model", "openrlhf_ppo"],
    "turn_gamma": ["algorithm.turn_gamma", "multi_turn"],
}


def fault(schema: type, name: str) -> str:
    """Return the error message for an unknown option."""
    (message,) = Vocabulary.from_schema(schema).with_adapters().translate([WrittenOption(name, "1")]).faults
    return message


KNOWN = set(fields_of(GRPOConfig))
RIGHT = [(name, right) for table in (TRL, OPENRLHF, VERL, COMMON) for name, right in table.items() if name not in KNOWN]


def test_the_synonym_cases_cover_more_than_150_names() -> None:
    assert len(RIGHT) + len(INSTEAD) + len(ELSEWHERE) > 150


@pytest.mark.parametrize(("name", "right"), RIGHT)
def test_the_error_for_an_option_name_of_another_system_gives_the_name_here(name: str, right: str) -> None:
    message = fault(GRPOConfig, name)
    assert message.startswith(f"unknown option {name!r}")
    # The first option in the message, if others are explained after it.
    assert right in message.partition(name)[2], message


@pytest.mark.parametrize("name", INSTEAD)
def test_the_error_for_a_name_without_an_equivalent_gives_the_alternative(name: str) -> None:
    message = fault(GRPOConfig, name)
    for fact in INSTEAD[name]:
        assert fact in message, message


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_error_for_an_option_of_other_recipes_names_them(name: str) -> None:
    message = fault(GRPOConfig, name)
    for fact in (*ELSEWHERE[name], "grpo has none"):
        assert fact in message, message


def test_a_name_is_resolved_to_the_options_of_the_recipe() -> None:
    assert "algorithm.gamma" in fault(ReinforceConfig, "discount")
    assert "algorithm.baseline" in fault(ReinforceConfig, "advantage_estimator")
    assert "algorithm.estimator" in fault(MultiTurnConfig, "advantage_estimator")
    assert says_whose(fault(MultiTurnConfig, "scale_rewards"), "algorithm.std_norm", "multi_turn has none")


def says_whose(text: str, *facts: str) -> bool:
    return all(fact in text for fact in facts)


def test_suggested_options_come_with_their_description() -> None:
    # warmup_steps has another unit than the intended option.
    assert "share of the run's optimizer steps" in fault(GRPOConfig, "warmup_steps")


def test_the_error_for_a_typing_error_gives_the_nearest_option() -> None:
    assert "'rollout.temperature'" in fault(GRPOConfig, "rollout.temprature")
    assert "samples_per_prompt" in fault(GRPOConfig, "num_generatoins")
    assert "--help" in fault(GRPOConfig, "nonsense_of_mine")


def test_a_key_of_a_fork_is_not_answered_with_a_similar_name() -> None:
    message = fault(VerlPPOConfig, "data.adarft.beta")
    assert "data.adarft.beta: AdaRFT's" in message and "kl_coef" not in message
    assert "no option begins with data.nofork" in fault(VerlPPOConfig, "data.nofork.beta")
    # A typing error in a group is close to a key of verl.
    assert "'train.learning_rate'" in fault(VerlPPOConfig, "actor_rollout_ref.actr.optim.lr")


def test_all_unknown_options_are_reported_together() -> None:
    with pytest.raises(ConfigError, match=says("train.learning_rate", "samples_per_prompt", "prompts_per_step")):
        load_config(GRPOConfig, ["lr=1", "num_generations=8", "batch_size=4", "model.path=m", "data.path=task:sort"])


def test_the_error_for_a_value_of_a_group_gives_the_intended_option() -> None:
    with pytest.raises(ConfigError, match=says("'model'", "model.path")):
        load_config(GRPOConfig, ["model=Qwen/Qwen3-0.6B", "data.path=task:sort"])


def test_every_option_of_the_table_that_all_recipes_share_exists() -> None:
    known = {name for schema in (GRPOConfig, ReinforceConfig, MultiTurnConfig) for name in fields_of(schema)}
    table = synonyms()
    assert {option for option in table.options if option not in known and not table.elsewhere(option)[0]} == set()
    for pattern, had_by in table.recipes.items():
        for recipe, schema in (
            ("grpo", GRPOConfig),
            ("reinforce_pp", ReinforceConfig),
            ("multi_turn", MultiTurnConfig),
        ):
            has = pattern in fields_of(schema) or any(
                name.startswith(pattern.removesuffix("*")) for name in fields_of(schema) if "*" in pattern
            )
            assert (recipe in had_by) == has, (pattern, recipe)


def test_no_synonym_is_the_name_of_an_existing_option() -> None:
    options = {option.name: option.meaning for option in options_of(GRPOConfig)}
    for name in synonyms().names:
        assert name not in options or answer(name, options, "grpo"), name


def test_the_page_of_option_names_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    assert runpy.run_path(str(ROOT / "scripts" / "option_names_page.py"))["main"](["--check"]) == 0


def test_the_table_of_recipes_matches_their_schemas() -> None:
    has = {name: set(fields_of(import_module(f"recipes.{name}.main").COMMAND.schema)) for name in RECIPES}
    table = synonyms()
    actual = {option: {name for name in RECIPES if option in has[name]} for option in table.options}
    listed = {option: set(table.elsewhere(option)[1]) or set(RECIPES) for option in table.options}
    assert listed == actual
