"""OpenRLHF's train_dpo: its names since 0.10, and what is not taken. Those of 0.9 are our own names."""

from collections.abc import Mapping
from typing import Any

from training.config import Refused

ALIASES: Mapping[str, str] = {
    "model.model_name_or_path": "pretrain",
    "ref.model_name_or_path": "ref_pretrain",
    "model.beta": "beta",
    "model.ipo_enable": "ipo",
    "model.label_smoothing": "label_smoothing",
    "model.nll_loss_coef": "nll_loss_coef",
    "model.gradient_checkpointing_enable": "gradient_checkpointing",
    "data.dataset": "dataset",
    "data.dataset_split": "dataset_split",
    "data.prompt_key": "prompt_key",
    "data.chosen_key": "chosen_key",
    "data.rejected_key": "rejected_key",
    "data.apply_chat_template": "apply_chat_template",
    "data.tokenizer_chat_template": "tokenizer_chat_template",
    "data.input_template": "input_template",
    "data.max_samples": "max_samples",
    "data.max_len": "max_len",
    "eval.dataset": "eval_dataset",
    "eval.split": "eval_split",
    "eval.steps": "eval_steps",
    "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size",
    "train.max_epochs": "max_epochs",
    "train.max_tokens_per_gpu": "max_tokens_per_gpu",
    "train.seed": "seed",
    "adam.lr": "learning_rate",
    "adam.betas": "adam_betas",
    "adam.weight_decay": "l2",
    "ds.zero_stage": "zero_stage",
    "ds.adam_offload": "adam_offload",
    "ds.attn_implementation": "attn_implementation",
    "ds.packing_samples": "packing_samples",
    "ds.lora.rank": "lora_rank",
    "ds.lora.alpha": "lora_alpha",
    "ds.lora.dropout": "lora_dropout",
    "ds.lora.target_modules": "target_modules",
    "ckpt.output_dir": "save_path",
    "ckpt.path": "ckpt_path",
    "ckpt.save_steps": "save_steps",
    "ckpt.max_num": "max_ckpt_num",
    "logger.logging_steps": "logging_steps",
    "logger.tensorboard_dir": "use_tensorboard",
    "logger.wandb.key": "use_wandb",
    "logger.wandb.org": "wandb_org",
    "logger.wandb.group": "wandb_group",
    "logger.wandb.project": "wandb_project",
    "logger.wandb.run_name": "wandb_run_name",
}
"""Their name -> ours."""


def _refused(names: str, why: str, kind: Any = bool, harmless: str = "") -> dict[str, Refused]:
    return dict.fromkeys(names.split(), Refused(why, kind, harmless))


REFUSED: Mapping[str, Refused] = {
    **_refused("ref_offload ref.offload", "the reference has left before training begins", harmless="true"),
    **_refused(
        "aux_loss_coef model.aux_loss_coef", "mixtures of experts have no loss of their own here", float, harmless="0"
    ),
    **_refused("load_in_4bit ds.load_in_4bit", "weights are trained in full precision; leave it out"),
    **_refused("dataset_probs data.dataset_probs", "give one dataset, mixed beforehand", str),
    **_refused("flash_attn", "use attn_implementation=flash_attention_2"),
    **_refused("param_dtype ds.param_dtype", "use bf16=true or bf16=false", str),
    **_refused("optim", "AdamW is the only optimizer", str, "adam"),
    **_refused("grad_accum_dtype ds.grad_accum_dtype", "gradients are always summed in float32", str, "fp32"),
    **_refused(
        "load_checkpoint ckpt.load_enable", "resume=auto, the default, goes on where there is one", harmless="true"
    ),
    **_refused(
        "save_hf_ckpt ckpt.save_hf", "every checkpoint has a folder that from_pretrained loads", harmless="true"
    ),
    **_refused("disable_ds_ckpt ckpt.disable_ds", "a checkpoint is whole or it is none; save_steps=-1 writes the last"),
    **_refused("max_ckpt_mem ckpt.max_mem", "use max_ckpt_num", float),
    **_refused("use_ds_universal_ckpt ds.use_universal_ckpt", "every checkpoint loads into any ranks", harmless="true"),
    **_refused(
        "ring_attn_size ring_head_stride ds.ring_attn_size ds.ring_attn_head_stride "
        "ds_tensor_parallel_size ds.tensor_parallel_size",
        "a sequence is on one rank; use gradient_checkpointing for long ones",
        int,
        "1",
    ),
    **_refused("zpg ds.zpg", "parameters are partitioned over all ranks", int, "1"),
    **_refused(
        "use_liger_kernel ds.use_liger_kernel deepcompile ds.deepcompile", "models run as transformers has them"
    ),
    **_refused("overlap_comm ds.overlap_comm", "train_engine=fsdp does; deepspeed reduces after each pass here"),
    **_refused(
        "gradient_checkpointing_use_reentrant model.gradient_checkpointing_reentrant",
        "activations are recomputed the non-reentrant way, which gives the same gradients; leave it out",
    ),
    **_refused(
        "full_determinism train.full_determinism_enable",
        "on the CPU a run with the same seed is bit-equal anyway; on a GPU nothing promises it; leave it out",
    ),
    **_refused("local_rank", "the core gives each rank its own; leave it out", int, "-1"),
    **_refused("disable_fast_tokenizer data.disable_fast_tokenizer", "transformers has one tokenizer per model"),
    **_refused("use_ms", "models and data come from folders or the Hugging Face hub; leave it out"),
}
"""What they have and this recipe does not, with the reason."""
