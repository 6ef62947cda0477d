"""Every option of the recipe. `--flag value` and `flag=value` mean the same."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from components.engines.config import TrainConfig
from training.config import ConfigError
from training.tracking import WandbConfig

from . import flags

RECIPE = Path(__file__).parent.name


@dataclass(kw_only=True)
class DPOConfig:
    """Make the better answers of pairs likelier than the others, without a reward model."""

    ALIASES: ClassVar = flags.ALIASES
    REFUSED: ClassVar = flags.REFUSED

    # --- the run
    run_dir: str = field(default_factory=lambda: f"runs/{RECIPE}-{time.strftime('%Y%m%d-%H%M%S')}")
    """Folder of everything that the run writes."""
    seed: int = 42
    """Fixes which pairs are held out, and the order of the others."""
    dry_run: bool = False
    """Print the plan and start nothing."""
    print_config: bool = False
    """Print the whole configuration as YAML, and start nothing."""
    job_name: str = RECIPE
    """Name of the job in messages."""

    # --- model
    pretrain: str = ""
    """The policy to start from: a folder or hub name, or `warm_start:<task>` for a task's demonstration model."""
    ref_pretrain: str | None = None
    """The reference that the policy is held to; asked once, before training. Default: where the policy starts."""
    attn_implementation: str | None = None
    """Attention kernels: sdpa, eager, flash_attention_2, or whatever transformers takes. Default: its own choice."""
    tokenizer_chat_template: str | None = None
    """Chat template instead of the tokenizer's own: Jinja, or a file with it. Saved with the policy."""

    # --- pairs
    dataset: str = ""
    """Pairs: a json, jsonl, csv, parquet or arrow file, a folder, a hub name, or `task:<name>` for a generated
    task's."""
    dataset_split: str = "train"
    """Which split of a hub name or folder; a file has only train."""
    prompt_key: str | None = None
    """Column of what both answers follow: text or chat messages. Default: what both answers begin with alike."""
    chosen_key: str = "chosen"
    """Column of the better answer: text, or a list of chat messages."""
    rejected_key: str = "rejected"
    """Column of the other."""
    apply_chat_template: bool = False
    """Take prompt and answer as a user's and an assistant's message. Chat messages always go through the template."""
    input_template: str | None = None
    """Text around each prompt, with `{}` in its place."""
    max_samples: int | None = None
    """Use at most this many pairs, the first ones. Default: all; of a generated task 10,000."""
    max_len: int = 512
    """Pairs with a longer answer (in tokens, with its prompt) are left out, and counted."""
    eval_dataset: str | None = None
    """Pairs that are only judged. Default: `eval_samples` of the dataset's."""
    eval_split: str = "train"
    """Which split of eval_dataset."""
    eval_samples: int = 256
    """Hold out at least so many pairs of the dataset, such that no conversation is on both sides; 0: none."""
    eval_steps: int = -1
    """Judge the held-out pairs every so many steps; -1 only at the start and at the end."""

    # --- optimisation
    train_batch_size: int = 128
    """Pairs per optimizer step, over all ranks."""
    micro_train_batch_size: int | None = None
    """Pairs in one pass of a rank, at most. Default: as many as max_tokens_per_gpu allows."""
    max_epochs: int = 1
    """Passes over the pairs."""
    beta: float = 0.1
    """How dear it is to leave the reference."""
    label_smoothing: float = 0.0
    """Share of the labels taken to be wrong (conservative DPO)."""
    ipo: bool = False
    """The squared loss of IPO instead of the logistic one."""
    nll_loss_coef: float = 0.0
    """Weight of the chosen answers' own negative log-likelihood, per token of an answer."""
    learning_rate: float = 1e-5
    """Peak learning rate."""
    lr_scheduler: Literal["cosine_with_min_lr", "linear", "constant"] = "cosine_with_min_lr"
    """Shape of the learning rate after its warm-up."""
    lr_warmup_ratio: float = 0.03
    """Share of all optimizer steps in which the learning rate rises from 0."""
    min_lr_ratio: float = 0.1
    """Where the decay ends, as a share of the peak."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    l2: float = 0.0
    """Weight decay."""
    max_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    train_engine: Literal["deepspeed", "fsdp"] = "deepspeed"
    """Who partitions the training over the ranks: DeepSpeed, or torch's fully_shard."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """What is partitioned: 1 optimizer state, 2 gradients too, 3 parameters too."""
    bf16: bool | None = None
    """Train in bfloat16. Default: where there is a GPU. Losses are float32 in any case."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    adam_offload: bool = False
    """Keep Adam's state in host memory."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank (peft) instead of the weights. 0: train all."""
    lora_alpha: float = 16.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Share of an adapter's inputs that is dropped in training."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Layers that get an adapter: their names or endings, or all-linear."""
    packing_samples: bool = False
    """Lay answers end to end instead of padding them. Changes no results but for rounding."""
    max_tokens_per_gpu: int = 16192
    """Token budget of a micro-batch on one rank. Changes memory and speed, never the result."""

    # --- checkpoints and recovery
    resume: str = "auto"
    """`auto` goes on from the latest checkpoint of run_dir (or ckpt_path) if there is one, a path from that step, run
    or folder of checkpoints; `none` begins anew, in a folder without a run."""
    save_steps: int = -1
    """A checkpoint every so many optimizer steps; -1 only when the training ends or is stopped."""
    ckpt_path: str | None = None
    """Folder of the checkpoints. Default: run_dir/checkpoints."""
    max_ckpt_num: int = 3
    """How many checkpoints are kept, the newest ones."""
    max_restarts: int = 3
    """How often all starts again from the latest checkpoint when a rank dies."""
    stall_timeout: float = 1800.0
    """Seconds without a sign of progress after which a process is ended as hung; 0: never."""
    backend: Literal["ray", "local"] = "ray"
    """Where the roles live: each in a process of its own, or all in this one, one at a time (for breakpoints)."""

    # --- placement and output
    num_nodes: int = 1
    """Machines that train."""
    num_gpus_per_node: int | None = None
    """Ranks per machine. Default: 1."""
    save_path: str | None = None
    """A second place for the trained policy; it is always in the run folder's checkpoints."""
    logging_steps: int = 1
    """Show every so many steps in the terminal; the files have all."""
    use_wandb: str | None = None
    """Log to W&B: an API key, or `true` to use WANDB_API_KEY. Without a key it stays offline, in the run folder."""
    wandb_org: str | None = None
    """W&B user or team that owns the project. Default: the key's."""
    wandb_project: str = "troupe"
    """W&B project."""
    wandb_group: str | None = None
    """W&B group."""
    wandb_run_name: str | None = None
    """W&B run. Default: the run folder's name."""
    use_tensorboard: str | None = None
    """Write TensorBoard's files: a folder, or `true` for run_dir/tensorboard."""

    def __post_init__(self) -> None:
        for name in ("pretrain", "ref_pretrain", "dataset", "eval_dataset", "save_path"):
            if (getattr(self, name) or "").startswith("~"):
                setattr(self, name, str(Path(getattr(self, name)).expanduser()))
        if not self.pretrain:
            raise ConfigError("pretrain is empty; set pretrain=FOLDER, or pretrain=warm_start:sort for a tiny model")
        if not self.dataset:
            raise ConfigError("dataset is empty; set dataset=FILE.jsonl, or dataset=task:sort")
        least = {"seed": 0, "max_restarts": 0, "eval_samples": 0}
        counts = ("train_batch_size", "max_epochs", "max_len", "max_ckpt_num", "logging_steps", "num_nodes")
        least |= dict.fromkeys((*counts, "max_samples", "micro_train_batch_size", "num_gpus_per_node"), 1)
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ConfigError(f"{name}={value}; set it to {lowest} or more")
        for name in ("save_steps", "eval_steps"):
            if getattr(self, name) == 0 or getattr(self, name) < -1:
                raise ConfigError(f"{name}={getattr(self, name)}; set 1 or more, or -1")
        if (self.eval_dataset or "").startswith("task:"):
            raise ConfigError(
                f"eval_dataset={self.eval_dataset}: a task draws the pairs of its dataset again; set eval_samples"
            )
        if self.input_template is not None:
            if "{}" not in self.input_template:
                raise ConfigError(
                    f"input_template={self.input_template!r} has no place for the prompt; write {{}} there"
                )
            if self.prompt_key is None or self.apply_chat_template:
                raise ConfigError(
                    "input_template goes around a prompt of its own column that is no chat message; set prompt_key and "
                    "leave apply_chat_template out, or leave input_template out"
                )
        if self.eval_steps > 0 and not (self.eval_dataset or self.eval_samples):
            raise ConfigError("eval_steps without held-out pairs; set eval_dataset or eval_samples, or leave it out")
        if self.train_batch_size < self.ranks:
            raise ConfigError(
                f"train_batch_size={self.train_batch_size} pairs for {self.ranks} ranks; set as many pairs or more"
            )
        if not self.beta > 0:
            raise ConfigError(f"beta={self.beta}; set it above 0")
        if not 0 <= self.label_smoothing < 0.5 or (self.label_smoothing and self.ipo):
            raise ConfigError(f"label_smoothing={self.label_smoothing}; set 0 to below 0.5, and 0 with ipo")
        if self.nll_loss_coef < 0:
            raise ConfigError(f"nll_loss_coef={self.nll_loss_coef}; set it to 0 or more")
        try:
            self.engine(total_steps=1, has_gpu=False)  # the engine's own checks, before it starts
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def ranks(self) -> int:
        """Processes that train."""
        return self.num_nodes * (self.num_gpus_per_node or 1)

    @property
    def models(self) -> dict[str, str]:
        """The models that were named, by option."""
        return {"pretrain": self.pretrain} | ({} if self.ref_pretrain is None else {"ref_pretrain": self.ref_pretrain})

    @property
    def sources(self) -> dict[str, tuple[str, str]]:
        """Where pairs come from, and of which split, by option."""
        heldout = {"eval_dataset": (self.eval_dataset, self.eval_split)} if self.eval_dataset else {}
        return {"dataset": (self.dataset, self.dataset_split)} | heldout

    @property
    def checkpoint_dir(self) -> Path:
        """Where the step folders are."""
        return Path(self.ckpt_path).expanduser() if self.ckpt_path else Path(self.run_dir) / "checkpoints"

    @property
    def wandb(self) -> WandbConfig | None:
        """Where W&B shows the run; None when it is off."""
        return WandbConfig.asked(
            self.use_wandb,
            org=self.wandb_org,
            project=self.wandb_project,
            group=self.wandb_group,
            run_name=self.wandb_run_name,
        )

    def engine(self, total_steps: int, has_gpu: bool) -> TrainConfig:
        """The training engine."""
        bf16 = has_gpu if self.bf16 is None else self.bf16
        return TrainConfig(
            engine=self.train_engine,
            zero_stage=self.zero_stage,
            precision="bf16" if bf16 else "fp32",
            learning_rate=self.learning_rate,
            betas=self.adam_betas,
            weight_decay=self.l2,
            max_norm=self.max_norm,
            lr_scheduler=self.lr_scheduler,
            lr_warmup_ratio=self.lr_warmup_ratio,
            min_lr_ratio=self.min_lr_ratio,
            total_steps=total_steps,
            max_tokens=self.max_tokens_per_gpu,
            max_sequences=2 * (self.micro_train_batch_size or 0),
            packing=self.packing_samples,
            gradient_checkpointing=self.gradient_checkpointing,
            adam_offload=self.adam_offload,
            lora_rank=self.lora_rank,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            lora_target_modules=",".join(self.target_modules),
            seed=self.seed,
        )
