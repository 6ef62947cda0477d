"""OpenRLHF's other flags: the dotted names of its newer versions, and what this recipe does not take, with the reason.

docs/from_openrlhf.md is written from this file and from config.py.
"""

from collections.abc import Mapping
from typing import Any

from core import Refused

ALIASES: Mapping[str, str] = {
    # placement
    **{
        f"{role}.{dotted}": f"{role}_{flat}"
        for role in ("actor", "critic", "ref", "reward")
        for dotted, flat in (("num_nodes", "num_nodes"), ("num_gpus_per_node", "num_gpus_per_node"))
    },
    "train.colocate_actor_ref": "colocate_actor_ref",
    "train.colocate_critic_reward": "colocate_critic_reward",
    "train.colocate_all": "colocate_all_models",
    "vllm.num_engines": "vllm_num_engines",
    # models
    "actor.model_name_or_path": "pretrain",
    "critic.model_name_or_path": "critic_pretrain",
    "reward.model_name_or_path": "reward_pretrain",
    "ds.value_head_prefix": "value_head_prefix",
    "value_prefix_head": "value_head_prefix",
    "ds.attn_implementation": "attn_implementation",
    # data
    "data.prompt_dataset": "prompt_data",
    "data.prompt_probs": "prompt_data_probs",
    "data.prompt_split": "prompt_split",
    "data.input_key": "input_key",
    "data.label_key": "label_key",
    "data.input_template": "input_template",
    "data.apply_chat_template": "apply_chat_template",
    "data.tokenizer_chat_template": "tokenizer_chat_template",
    "data.max_samples": "max_samples",
    # rollout
    "rollout.batch_size": "rollout_batch_size",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "rollout.max_new_tokens": "generate_max_len",
    "rollout.temperature": "temperature",
    "rollout.max_tokens_per_gpu": "rollout_max_tokens_per_gpu",
    # rewards
    "reward.remote_url": "remote_rm_url",
    "reward.normalize_enable": "normalize_reward",
    "reward.clip_range": "reward_clip_range",
    "reward.overlong_buffer_len": "overlong_buffer_len",
    "reward.overlong_penalty_factor": "overlong_penalty_factor",
    "reward.stop_properly_penalty_coef": "stop_properly_penalty_coef",
    # training
    "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size",
    "train.max_epochs": "max_epochs",
    "train.num_episodes": "num_episodes",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "train.max_tokens_per_gpu": "train_max_tokens_per_gpu",
    "train.seed": "seed",
    "actor.adam.lr": "actor_learning_rate",
    "critic.adam.lr": "critic_learning_rate",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "ds.zero_stage": "zero_stage",
    "ds.adam_offload": "adam_offload",
    "ds.overlap_comm": "overlap_comm",
    # algorithm
    "algo.advantage.estimator": "advantage_estimator",
    "algo.advantage.lambd": "lambd",
    "algo.advantage.gamma": "gamma",
    "algo.advantage.no_std_norm": "no_advantage_std_norm",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.estimator": "kl_estimator",
    "algo.kl.use_loss": "use_kl_loss",
    "actor.eps_clip": "eps_clip",
    "actor.eps_clip_low_high": "eps_clip_low_high",
    "actor.entropy_coef": "entropy_loss_coef",
    "critic.value_clip": "value_clip",
    "critic.freezing_steps": "freezing_actor_steps",
    "critic.save_value_network": "save_value_network",
    # evaluation, output, logging
    "eval.dataset": "eval_dataset",
    "eval.split": "eval_split",
    "eval.steps": "eval_steps",
    "eval.temperature": "eval_temperature",
    "eval.n_samples_per_prompt": "eval_n_samples_per_prompt",
    "ckpt.output_dir": "save_path",
    "ckpt.best_metric_key": "best_eval_metric_key",
    "logger.wandb.key": "use_wandb",
    "logger.wandb.org": "wandb_org",
    "logger.wandb.group": "wandb_group",
    "logger.wandb.project": "wandb_project",
    "logger.wandb.run_name": "wandb_run_name",
}
"""OpenRLHF's name since 0.10 -> the name here, which is the one of 0.9 and of the guides."""

OURS = (
    *("run_dir", "dry_run", "job_name", "pad_token", "scorer", "reward_weights", "reward_workers", "reward_timeout"),
    *("remote_rm_timeout", "remote_rm_batch_size", "max_eval_samples"),
)
"""Options that OpenRLHF does not have."""

OTHER_DEFAULTS: Mapping[str, str] = {
    **dict.fromkeys(("actor_num_gpus_per_node", "critic_num_gpus_per_node"), "8"),
    **dict.fromkeys(("ref_num_gpus_per_node", "reward_num_gpus_per_node"), "8"),
    "vllm_num_engines": "None",
    "attn_implementation": "flash_attention_2",
    "bf16": "true (param_dtype)",
    "max_samples": "1e8",
    "eval_split": "train",
    "save_path": "./ckpt",
    "wandb_project": "openrlhf_train_ppo",
    "wandb_run_name": "ppo_ and the time",
}
"""OpenRLHF's defaults where ours differ, because the machine, the run folder or the data decides here."""

Pair = tuple[float, float]


def _refuse(why: str, *names: str, kind: Any = bool, harmless: str = "") -> dict[str, Refused]:
    return dict.fromkeys(names, Refused(why, kind, harmless))


_NOT_YET = {
    # vLLM
    **_refuse(
        "not yet: an engine runs on one device; leave it out",
        *("vllm_tensor_parallel_size", "vllm.tensor_parallel_size"),
        kind=int,
        harmless="1",
    ),
    **_refuse(
        "not yet: generation runs on transformers, which keeps no pool of memory; leave it out",
        *("vllm_gpu_memory_utilization", "vllm.gpu_memory_utilization"),
        kind=float,
    ),
    **_refuse(
        "not yet: weights go through shared memory or a file, for which there is nothing to choose; leave it out",
        *("vllm_sync_backend", "vllm.sync_backend"),
        kind=str,
    ),
    **_refuse("not yet: it is a choice of NCCL's; leave it out", "vllm_sync_with_ray", "vllm.sync_with_ray"),
    **_refuse(
        "not yet: it comes with the vLLM engine; leave it out",
        *("enable_prefix_caching", "vllm.enable_prefix_caching", "enforce_eager", "vllm.enforce_eager"),
        *("vllm_enable_sleep", "vllm.enable_sleep"),
    ),
    **_refuse(
        "not yet: a model stays where it was loaded; leave it out",
        *("deepspeed_enable_sleep", "ds.enable_sleep", "ref_reward_offload", "reward.offload", "ref.offload"),
    ),
    **_refuse("not yet: sample from the whole distribution", "top_p", "rollout.top_p", kind=float, harmless="1.0"),
    # agents and asynchronous training
    **_refuse(
        "not yet: answers have one turn; score them with remote_rm_url=FILE.py",
        *("agent_func_path", "train.agent_func_path"),
        kind=str,
    ),
    **_refuse(
        "not yet: every step waits for its own samples; leave it out",
        *("async_train", "train.async_enable", "partial_rollout", "train.partial_rollout_enable"),
    ),
    **_refuse(
        "not yet: every step waits for its own samples; leave it out",
        *("async_queue_size", "train.async_queue_size"),
        *("vllm_generate_batch_size", "rollout.vllm_generate_batch_size"),
        kind=int,
    ),
    # maths
    **_refuse("not yet: all groups are trained on; leave it out", "dynamic_filtering", "algo.dynamic_filtering_enable"),
    **_refuse(
        "not yet: all groups are trained on; leave it out",
        *("dynamic_filtering_reward_range", "algo.dynamic_filtering_range"),
        kind=Pair,
    ),
    **_refuse(
        "not yet: the gap between the engine's and the trainer's log-probabilities is logged, not corrected (on one "
        "machine in float32 it is below 1e-4); leave it out",
        *("enable_vllm_is_correction", "algo.advantage.is_correction_enable", "use_icepop"),
    ),
    **_refuse(
        "not yet: nothing is corrected; leave it out",
        *("vllm_is_truncated_threshold", "algo.advantage.is_correction_threshold"),
        kind=Pair,
    ),
    **_refuse(
        "not yet: nothing is corrected; leave it out",
        *("vllm_is_correction_type", "algo.advantage.is_correction_type"),
        kind=str,
    ),
    **_refuse("not yet: the KL weight is fixed; set init_kl_coef", "kl_target", "algo.kl.target", kind=float),
    **_refuse("not yet: the KL weight is fixed; set init_kl_coef", "kl_horizon", "algo.kl.horizon", kind=int),
    **_refuse("not yet: the loss is PPO's", "policy_loss_type", "actor.policy_loss_type", kind=str, harmless="ppo"),
    **_refuse("not yet: set eps_clip_low_high for two bounds", "dual_clip", "actor.dual_clip", kind=float),
    **_refuse("not yet: the trained weights are saved, no average; leave it out", "enable_ema", "train.enable_ema"),
    **_refuse("not yet: there is no average of weights", "ema_beta", "train.ema_beta", kind=float),
    # training engine
    **_refuse(
        "not yet: sequences are padded within a micro-batch; use_dynamic_batch keeps that small",
        *("packing_samples", "ds.packing_samples"),
    ),
    **_refuse("not yet: all weights are trained; leave it out", "lora_rank", "ds.lora.rank", kind=int, harmless="0"),
    **_refuse("not yet: all weights are trained; leave it out", "lora_alpha", "ds.lora.alpha", kind=int),
    **_refuse("not yet: all weights are trained; leave it out", "lora_dropout", "ds.lora.dropout", kind=float),
    **_refuse("not yet: all weights are trained", "target_modules", "ds.lora.target_modules", kind=list[str]),
    # checkpoints and logs
    **_refuse(
        "not yet: a stopped run begins anew; the trained policy, and the best one by eval_dataset, are kept in "
        "run_dir/checkpoints",
        *("save_steps", "ckpt.save_steps"),
        kind=int,
        harmless="-1",
    ),
    **_refuse(
        "not yet: a stopped run begins anew; leave it out",
        *("load_checkpoint", "ckpt.load_enable", "use_ds_universal_ckpt", "ds.use_universal_ckpt"),
    ),
    **_refuse("not yet: checkpoints are in run_dir; set run_dir", "ckpt_path", "ckpt.path", kind=str),
    **_refuse("not yet: the last and the best are kept; leave it out", "max_ckpt_num", "ckpt.max_num", kind=int),
    **_refuse("not yet: the last and the best are kept; leave it out", "max_ckpt_mem", "ckpt.max_mem", kind=float),
    **_refuse(
        "not yet: use_wandb, or read run_dir/metrics.jsonl", "use_tensorboard", "logger.tensorboard_dir", kind=str
    ),
}

_NOT = {
    # one setting for actor and critic
    **{
        f"{role}.{dotted}": Refused(f"actor and critic share one setting here: use {flat}", kind)
        for role in ("actor", "critic")
        for dotted, flat, kind in (
            ("adam.betas", "adam_betas", Pair),
            ("adam.eps", "adam_eps", float),
            ("adam.weight_decay", "l2", float),
            ("lr_scheduler", "lr_scheduler", str),
            ("lr_warmup_ratio", "lr_warmup_ratio", float),
            ("min_lr_ratio", "min_lr_ratio", float),
            ("max_norm", "max_norm", float),
        )
    },
    **_refuse(
        "AdamW is the only optimizer; set actor_learning_rate and critic_learning_rate",
        *("optim", "actor.optim", "critic.optim"),
        kind=str,
        harmless="adam",
    ),
    **{
        f"{role}.muon.{name}": Refused("AdamW is the only optimizer; leave it out", kind)
        for role in ("actor", "critic")
        for name, kind in (
            ("lr", float),
            ("momentum", float),
            ("ns_steps", int),
            ("nesterov", bool),
            ("no_nesterov", bool),
        )
    },
    **_refuse("one setting for all roles: use gradient_checkpointing", "critic.gradient_checkpointing_enable"),
    **_refuse(
        "activations are always recomputed the non-reentrant way, which gives the same gradients; leave it out",
        *("gradient_checkpointing_use_reentrant", "actor.gradient_checkpointing_reentrant"),
    ),
    # lengths and types
    **_refuse("give prompt_max_len and generate_max_len", "max_len", "data.max_len", kind=int),
    **_refuse("fp16 needs a loss scale that changes results; use bf16", "fp16"),
    **_refuse("use bf16=true or bf16=false", "param_dtype", "ds.param_dtype", kind=str),
    **_refuse("use attn_implementation=flash_attention_2", "flash_attn"),
    **_refuse(
        "gradients are always summed in float32", "grad_accum_dtype", "ds.grad_accum_dtype", kind=str, harmless="fp32"
    ),
    # models that this recipe does not train
    **_refuse(
        "prompts are text: no images, no mixtures of experts; leave it out",
        *("aux_loss_coef", "actor.aux_loss_coef", "max_images_per_prompt", "data.max_images_per_prompt"),
        kind=float,
        harmless="0",
    ),
    **_refuse(
        "prompts are text: no images, no mixtures of experts; leave it out",
        *("image_key", "data.image_key", "experts_implementation", "ds.experts_implementation"),
        kind=str,
    ),
    **_refuse("prompts are text; leave it out", "freeze_visual_encoder", "actor.freeze_visual_encoder"),
    # DeepSpeed's other ways
    **_refuse("weights are trained in full precision; leave it out", "load_in_4bit", "ds.load_in_4bit"),
    **_refuse("parameters are partitioned over all ranks", "zpg", "ds.zpg", kind=int, harmless="1"),
    **_refuse(
        "a sequence is on one rank; use gradient_checkpointing for long ones",
        *("ds_tensor_parallel_size", "ds.tensor_parallel_size", "ring_attn_size", "ds.ring_attn_size"),
        *("ring_head_stride", "ds.ring_attn_head_stride"),
        kind=int,
        harmless="1",
    ),
    **_refuse(
        "models run as transformers has them",
        "use_liger_kernel",
        "ds.use_liger_kernel",
        "deepcompile",
        "ds.deepcompile",
    ),
    **_refuse(
        "on the CPU a run with the same seed is bit-equal anyway; on a GPU nothing promises it; leave it out",
        *("full_determinism", "train.full_determinism_enable"),
    ),
    **_refuse("the core gives each rank its own; leave it out", "local_rank", kind=int, harmless="-1"),
    # data, output
    **_refuse(
        "transformers has one tokenizer per model; leave it out",
        "disable_fast_tokenizer",
        "data.disable_fast_tokenizer",
    ),
    **_refuse(
        "prompts are read once at the start, by no extra process",
        *("dataloader_num_workers", "data.dataloader_num_workers"),
        kind=int,
        harmless="0",
    ),
    **_refuse("models and data come from folders or the Hugging Face hub; leave it out", "use_ms"),
    **_refuse("every step is logged", "logging_steps", "logger.logging_steps", kind=int, harmless="1"),
    **_refuse(
        "the policy is always saved as a folder that from_pretrained loads",
        "save_hf_ckpt",
        "ckpt.save_hf",
        harmless="true",
    ),
    **_refuse("there are no DeepSpeed checkpoints", "disable_ds_ckpt", "ckpt.disable_ds", harmless="true"),
    # gone from OpenRLHF too
    **_refuse("OpenRLHF has dropped it; mix such data into a run of recipes/sft", "ptx_coef", kind=float, harmless="0"),
    **_refuse("timing_s and perf are in every step's metrics; leave it out", "perf"),
    **_refuse("models are loaded where they live; leave it out", "actor_init_on_gpu"),
    # its other commands
    **_refuse("that is train_sft's and train_rm's; give prompt_data", "dataset", "data.dataset", kind=str),
    **_refuse("use actor_learning_rate and critic_learning_rate", "learning_rate", "adam.lr", kind=float),
    **_refuse("train_rm's, which is not here yet; PPO takes a reward_pretrain", "chosen_key", "rejected_key", kind=str),
    **_refuse("serve_rm's, which is not here yet; PPO takes a remote_rm_url", "port", "batch_size", kind=int),
    **_refuse("serve_rm's, which is not here yet; PPO takes a remote_rm_url", "host", kind=str),
}

REFUSED: Mapping[str, Refused] = _NOT_YET | _NOT
"""OpenRLHF's flags that this recipe knows and does not take. "not yet" says that a later version brings it."""
