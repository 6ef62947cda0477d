"""OpenRLHF's train_dpo: its names since 0.10, and what is not taken. Those of 0.9 are our own names."""

from collections.abc import Mapping

from core import Refused

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
}
"""Their name -> ours."""

_GONE = Refused("the reference has left before training begins", harmless="true")
_RESUME = Refused("resume=auto, the default, goes on where there is a checkpoint", harmless="true")
_EXPORT = Refused("the policy is always saved as a folder that from_pretrained loads", harmless="true")
_RANK = Refused("the core gives each rank its own; leave it out", int, "-1")
_TEXT = Refused("pairs are text, and mixtures of experts have no loss of their own here", float, "0")
_WHOLE = Refused("a sequence is on one rank; use gradient_checkpointing for long ones", int, "1")

REFUSED: Mapping[str, Refused] = {
    "ref_offload": _GONE,
    "ref.offload": _GONE,
    "load_checkpoint": _RESUME,
    "ckpt.load_enable": _RESUME,
    "save_hf_ckpt": _EXPORT,
    "ckpt.save_hf": _EXPORT,
    "local_rank": _RANK,
    "aux_loss_coef": _TEXT,
    "model.aux_loss_coef": _TEXT,
    "ring_attn_size": _WHOLE,
    "ds.ring_attn_size": _WHOLE,
    "flash_attn": Refused("use attn_implementation=flash_attention_2"),
    "param_dtype": Refused("use bf16=true or bf16=false", str),
    "ds.param_dtype": Refused("use bf16=true or bf16=false", str),
    "optim": Refused("AdamW is the only optimizer", str, "adam"),
}
"""What they have and this recipe does not, with the reason."""
