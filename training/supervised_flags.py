"""OpenRLHF's names for the options of SupervisedOptions and PairOptions, and what none of these recipes takes.

Its names of 0.9 are ours. Nothing here needs torch.
"""

from collections.abc import Mapping
from typing import Any

from training.adapter import Refused

_GROUPS = {
    "data": "dataset input_template max_len max_samples tokenizer_chat_template",
    "ds": "adam_offload attn_implementation packing_samples zero_stage",
    "train": "max_epochs max_tokens_per_gpu seed",
    "ckpt": "save_steps",
    "logger": "logging_steps",
}
"""Since 0.10 they have a prefix, and are otherwise the same."""

ALIASES: Mapping[str, str] = {
    **{f"{group}.{name}": name for group, names in _GROUPS.items() for name in names.split()},
    **{f"logger.wandb.{name}": f"wandb_{name}" for name in ("org", "group", "project", "run_name")},
    "model.model_name_or_path": "pretrain",
    "model.gradient_checkpointing_enable": "gradient_checkpointing",
    "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size",
    "eval.steps": "eval_steps",
    "adam.lr": "learning_rate",
    "adam.betas": "adam_betas",
    "adam.weight_decay": "l2",
    "ckpt.output_dir": "save_path",
    "ckpt.path": "ckpt_path",
    "ckpt.max_num": "max_ckpt_num",
    "logger.tensorboard_dir": "use_tensorboard",
    "logger.wandb.key": "use_wandb",
}
"""The name since OpenRLHF 0.10 -> the name here."""

PAIR_ALIASES: Mapping[str, str] = {
    **{
        f"data.{name}": name
        for name in ("dataset_split", "prompt_key", "chosen_key", "rejected_key", "apply_chat_template")
    },
    "eval.dataset": "eval_dataset",
    "eval.split": "eval_split",
}
"""Further ones of PairOptions."""


def refused(names: str, why: str, kind: Any = bool, harmless: str = "") -> dict[str, Refused]:
    """Options, with blanks between, that are not taken; see `Refused`."""
    return dict.fromkeys(names.split(), Refused(why, kind, harmless))


REFUSED: Mapping[str, Refused] = {
    **refused("aux_loss_coef model.aux_loss_coef", "mixtures of experts have no loss of their own here", float, "0"),
    **refused("load_in_4bit ds.load_in_4bit", "weights are trained in full precision; leave it out"),
    **refused("dataset_probs data.dataset_probs", "give one dataset, mixed beforehand", str),
    **refused("flash_attn", "use attn_implementation=flash_attention_2"),
    **refused("param_dtype ds.param_dtype", "use bf16=true or bf16=false", str),
    **refused("optim", "AdamW is the only optimizer", str, "adam"),
    **refused("grad_accum_dtype ds.grad_accum_dtype", "gradients are always summed in float32", str, "fp32"),
    **refused("load_checkpoint ckpt.load_enable", "resume=auto, the default, does so", harmless="true"),
    **refused("save_hf_ckpt ckpt.save_hf", "every checkpoint has a folder that from_pretrained loads", harmless="true"),
    **refused("disable_ds_ckpt ckpt.disable_ds", "a checkpoint is whole or it is none; save_steps=-1 writes the last"),
    **refused("max_ckpt_mem ckpt.max_mem", "use max_ckpt_num", float),
    **refused("use_ds_universal_ckpt ds.use_universal_ckpt", "every checkpoint loads into any ranks", harmless="true"),
    **refused(
        "ring_attn_size ring_head_stride ds.ring_attn_size ds.ring_attn_head_stride "
        "ds_tensor_parallel_size ds.tensor_parallel_size",
        "a sequence is on one rank; use gradient_checkpointing for long ones",
        int,
        "1",
    ),
    **refused("zpg ds.zpg", "parameters are partitioned over all ranks", int, "1"),
    **refused("use_liger_kernel ds.use_liger_kernel", "models run as transformers has them"),
    **refused("deepcompile ds.deepcompile", "models run as transformers has them"),
    **refused("overlap_comm ds.overlap_comm", "train_engine=fsdp does; deepspeed reduces after each pass here"),
    **refused(
        "gradient_checkpointing_use_reentrant model.gradient_checkpointing_reentrant",
        "activations are recomputed the non-reentrant way, which gives the same gradients; leave it out",
    ),
    **refused(
        "full_determinism train.full_determinism_enable",
        "on the CPU a run with the same seed is bit-equal anyway; on a GPU nothing promises it; leave it out",
    ),
    **refused("local_rank", "the core gives each rank its own; leave it out", int, "-1"),
    **refused("disable_fast_tokenizer data.disable_fast_tokenizer", "transformers has one tokenizer per model"),
    **refused("use_ms", "models and data come from folders or the Hugging Face hub; leave it out"),
}
"""What OpenRLHF has and these recipes have not, with the reason."""
