"""Every option of the recipe. `--flag value` and `flag=value` mean the same."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from components.engines.config import TrainConfig
from training.config import ConfigError

RECIPE = Path(__file__).parent.name


@dataclass(kw_only=True)
class SFTConfig:
    """Learn to answer as the demonstrations do."""

    # --- the run
    run_dir: str = field(default_factory=lambda: f"runs/{RECIPE}-{time.strftime('%Y%m%d-%H%M%S')}")
    """Folder of everything that the run writes."""
    seed: int = 42
    """Fixes the order of the demonstrations, and a new model's first weights."""
    dry_run: bool = False
    """Print the plan and start nothing."""
    print_config: bool = False
    """Print the whole configuration as YAML, and start nothing."""
    job_name: str = RECIPE
    """Name of the job in messages."""

    # --- model and data
    pretrain: str = ""
    """The model to start from: a folder or hub name, or `new:<task>` for an untrained tiny model of a task."""
    dataset: str = ""
    """Demonstrations: a json, jsonl or parquet file of rows with `prompt` and `response`, or with `messages`; or
    `task:<name>` for a generated task's."""
    input_template: str | None = None
    """Text around each prompt, with `{}` in its place."""
    max_samples: int = 100_000
    """Use at most this many demonstrations."""
    max_len: int = 2048
    """Longer demonstrations (in tokens) are left out, and counted."""
    eval_samples: int = 0
    """Hold out so many demonstrations, the last ones, and report the loss on them."""

    # --- optimisation
    train_batch_size: int = 128
    """Demonstrations per optimizer step, over all ranks."""
    max_epochs: int = 1
    """Passes over the demonstrations."""
    learning_rate: float = 5e-6
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
    zero_stage: Literal[0, 1, 2, 3] = 2
    """What DeepSpeed partitions: 1 optimizer state, 2 gradients too, 3 parameters too."""
    bf16: bool | None = None
    """Train in bfloat16. Default: where there is a GPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    adam_offload: bool = False
    """Keep Adam's state in host memory."""
    max_tokens_per_gpu: int = 16192
    """Token budget of a micro-batch on one rank. Changes memory and speed, never the result."""

    # --- checkpoints and recovery
    resume: str = "auto"
    """`auto` goes on from the latest checkpoint of run_dir (or ckpt_path) if there is one, a path from that step, run
    or folder of checkpoints; `none` begins anew, in a folder without a run."""
    save_steps: int = 100
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
    """A second place for the trained model; it is always in the run folder's checkpoints."""
    use_wandb: bool = False
    """Log to W&B, with WANDB_API_KEY; without a key it stays offline, in the run folder."""
    use_tensorboard: bool = False
    """Write TensorBoard's files to run_dir/tensorboard."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed}; set it to 0 or more")
        if not self.pretrain:
            raise ConfigError("pretrain is empty; set pretrain=FOLDER, or pretrain=new:sort for a tiny model")
        if not self.dataset:
            raise ConfigError("dataset is empty; set dataset=FILE.jsonl, or dataset=task:sort")
        for name in ("train_batch_size", "max_epochs", "max_samples", "max_len", "max_ckpt_num"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; set it to at least 1")
        if self.save_steps == 0 or self.save_steps < -1:
            raise ConfigError(f"save_steps={self.save_steps}; set 1 or more, or -1 for the last step only")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts={self.max_restarts}; set it to 0 or more")
        self.engine(total_steps=1, has_gpu=False)  # the engine's own checks, before it starts

    @property
    def checkpoint_dir(self) -> Path:
        """Where the step folders are."""
        return Path(self.ckpt_path).expanduser() if self.ckpt_path else Path(self.run_dir) / "checkpoints"

    def engine(self, total_steps: int, has_gpu: bool) -> TrainConfig:
        """The training engine."""
        bf16 = has_gpu if self.bf16 is None else self.bf16
        return TrainConfig(
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
            gradient_checkpointing=self.gradient_checkpointing,
            adam_offload=self.adam_offload,
            seed=self.seed,
        )
