"""What the configurations of supervised recipes share: flat options, under OpenRLHF's names, and their checks.

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from components.engines.config import TrainConfig
from training import supervised_flags
from training.options import RunOptions
from training.schema import ConfigError
from training.tracking import WandbConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.data.preferences import PairFormat

_LEAST = {
    "eval_samples": 0,
    **dict.fromkeys(("train_batch_size", "micro_train_batch_size", "max_epochs", "max_samples", "max_len"), 1),
    **dict.fromkeys(("max_ckpt_num", "logging_steps", "num_nodes", "num_gpus_per_node"), 1),
}


@dataclass(kw_only=True)
class SupervisedOptions(RunOptions):
    """The options of a recipe that trains one model on data that is there from the start."""

    ALIASES: ClassVar[Mapping[str, str]] = supervised_flags.ALIASES
    REFUSED: ClassVar[Mapping[str, Any]] = supervised_flags.REFUSED
    EXAMPLES: ClassVar[str] = "examples"
    """What a recipe calls them in messages."""
    GROUP_SIZE: ClassVar[int] = 1
    """Sequences of an example, which stay together."""
    PATHS: ClassVar[tuple[str, ...]] = ("pretrain", "dataset", "save_path", "ckpt_path")
    """Options that may begin with ~."""

    seed: int = 42
    """Fixes what is held out, the order of the rest, and the first weights of what is new."""
    job_name: str = ""
    """Name of the job in messages. Default: the recipe's."""

    # --- model and data
    pretrain: str = ""
    """The model to start from: a folder or hub name, or `warm_start:<task>` for a task's demonstration model."""
    attn_implementation: str | None = None
    """Attention kernels: sdpa, eager, flash_attention_2, or whatever transformers takes. Default: its own choice."""
    tokenizer_chat_template: str | None = None
    """Chat template instead of the tokenizer's own: Jinja, or a file with it. Saved with the model."""
    dataset: str = ""
    """What to train on: a json, jsonl, csv, parquet or arrow file, a folder, a hub name, or `task:<name>` for a
    generated task's."""
    input_template: str | None = None
    """Text around each prompt, with `{}` in its place."""
    max_samples: int | None = None
    """Use at most this many examples, the first ones. Default: all; of a generated task 10,000."""
    max_len: int = 2048
    """Longer examples (in tokens) are left out, and counted."""
    eval_samples: int = 0
    """Hold out so many examples to evaluate on; 0: none."""
    eval_steps: int = -1
    """Evaluate every so many steps; -1 only at the start and at the end."""

    # --- optimisation
    train_batch_size: int = 128
    """Examples per optimizer step, over all ranks."""
    micro_train_batch_size: int | None = None
    """Examples in one pass of a rank, at most. Default: as many as max_tokens_per_gpu allows."""
    max_epochs: int = 1
    """Passes over the examples."""
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
    packing_samples: bool = False
    """Lay sequences end to end instead of padding them. Changes no results but for rounding."""
    max_tokens_per_gpu: int = 16192
    """Token budget of a micro-batch on one rank. Changes memory and speed, never the result."""

    # --- checkpoints, placement, output
    save_steps: int = -1
    """A checkpoint every so many optimizer steps; -1 only when the training ends or is stopped."""
    ckpt_path: str | None = None
    """Folder of the checkpoints. Default: run_dir/checkpoints."""
    max_ckpt_num: int = 3
    """How many checkpoints are kept, the newest ones."""
    save_path: str | None = None
    """A second place for the trained model; it is always in the run folder's checkpoints."""
    num_nodes: int = 1
    """Machines that train."""
    num_gpus_per_node: int | None = None
    """Ranks per machine. Default: 1."""
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
        super().__post_init__()
        for name in self.PATHS:
            if (getattr(self, name) or "").startswith("~"):
                setattr(self, name, str(Path(getattr(self, name)).expanduser()))
        for name in ("pretrain", "dataset"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty; set {name}=..., or run without options for the demonstration")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value}; set it to {least} or more")
        for name in ("save_steps", "eval_steps"):
            value = getattr(self, name)
            if value == 0 or value < -1:
                raise ConfigError(f"{name}={value}; set 1 or more, or -1")
        if self.input_template is not None and "{}" not in self.input_template:
            raise ConfigError(f"input_template={self.input_template!r} has no place for the prompt; write {{}} there")
        if self.eval_steps > 0 and not self.holds_out:
            raise ConfigError(f"eval_steps={self.eval_steps}, but nothing is held out; set eval_samples too")
        if self.train_batch_size < self.ranks:
            raise ConfigError(
                f"train_batch_size={self.train_batch_size} {self.EXAMPLES} for {self.ranks} ranks; set as many or more"
            )
        self.engine(total_steps=1, has_gpu=False)  # the engine's own checks, before it starts

    @property
    def ranks(self) -> int:
        """Processes that train."""
        return self.num_nodes * (self.num_gpus_per_node or 1)

    @property
    def holds_out(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.eval_samples > 0

    @property
    def models(self) -> dict[str, str]:
        """The models that have to be there, by option."""
        return {"pretrain": self.pretrain}

    @property
    def checkpoint_folder(self) -> Path:
        """Where the step folders are."""
        return Path(self.ckpt_path or f"{self.run_dir}/checkpoints")

    def sinks(self) -> dict[str, Any]:
        """What `Tracker` is told of who reads along."""
        wandb = WandbConfig.asked(
            self.use_wandb,
            org=self.wandb_org,
            project=self.wandb_project,
            group=self.wandb_group,
            run_name=self.wandb_run_name,
        )
        return {"wandb": wandb, "tensorboard": self.use_tensorboard}

    def tokenizer(self, path: str) -> PreTrainedTokenizerBase:
        """Of the model at `path`; it pads with its end token where it has no other."""
        from components.data.text import load_tokenizer

        return load_tokenizer(path, chat_template=self.tokenizer_chat_template, pad_with_end=True)

    def engine(self, total_steps: int, has_gpu: bool) -> TrainConfig:
        """The training engine, in a run of so many optimizer steps."""
        bf16 = has_gpu if self.bf16 is None else self.bf16
        return TrainConfig(
            engine=self.train_engine,
            zero_stage=self.zero_stage,
            precision="bf16" if bf16 else "fp32",
            learning_rate=self.learning_rate,
            betas=self.adam_betas,
            weight_decay=self.l2,
            max_grad_norm=self.max_norm,
            lr_scheduler=self.lr_scheduler,
            lr_warmup_ratio=self.lr_warmup_ratio,
            min_lr_ratio=self.min_lr_ratio,
            total_steps=total_steps,
            max_tokens=self.max_tokens_per_gpu,
            max_sequences=self.GROUP_SIZE * (self.micro_train_batch_size or 0),
            packing=self.packing_samples,
            gradient_checkpointing=self.gradient_checkpointing,
            adam_offload=self.adam_offload,
            seed=self.seed,
        )


@dataclass(kw_only=True)
class PairOptions(SupervisedOptions):
    """The options of a recipe that learns from pairs of responses, of which one is better."""

    ALIASES: ClassVar[Mapping[str, str]] = {**SupervisedOptions.ALIASES, **supervised_flags.PAIR_ALIASES}
    EXAMPLES: ClassVar[str] = "pairs"
    GROUP_SIZE: ClassVar[int] = 2
    PATHS: ClassVar[tuple[str, ...]] = (*SupervisedOptions.PATHS, "eval_dataset")

    dataset_split: str = "train"
    """Which split of a hub name or folder; a file has only train."""
    prompt_key: str | None = None
    """Column of what both responses follow: text or chat messages. Default: what both begin with alike."""
    chosen_key: str = "chosen"
    """Column of the better response: text, or a list of chat messages."""
    rejected_key: str = "rejected"
    """Column of the other."""
    apply_chat_template: bool = False
    """Take prompt and response as a user's and an assistant's message. Chat messages always go through the template."""
    max_len: int = 512
    """Pairs with a longer response (in tokens, with its prompt) are left out, and counted."""
    eval_dataset: str | None = None
    """Pairs that are only evaluated on. Default: `eval_samples` of the dataset's."""
    eval_split: str = "train"
    """Which split of eval_dataset."""
    eval_samples: int = 256
    """Hold out at least so many pairs of the dataset, such that no conversation is on both sides; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.eval_dataset or "").startswith("task:"):
            raise ConfigError(
                f"eval_dataset={self.eval_dataset}: a task draws the pairs of its dataset again; set eval_samples"
            )
        if self.input_template is not None and (self.prompt_key is None or self.apply_chat_template):
            raise ConfigError(
                "input_template goes around a prompt of its own column that is no chat message; set prompt_key and "
                "leave apply_chat_template out, or leave input_template out"
            )

    @property
    def holds_out(self) -> bool:
        """See `SupervisedOptions.holds_out`."""
        return bool(self.eval_dataset) or super().holds_out

    @property
    def sources(self) -> dict[str, tuple[str, str]]:
        """Where pairs come from, and of which split, by option."""
        found = {"dataset": (self.dataset, self.dataset_split)}
        if self.eval_dataset:
            found["eval_dataset"] = (self.eval_dataset, self.eval_split)
        return found

    def pair_format(self, source: str) -> PairFormat:
        """Where the rows of a source have their pairs."""
        from components.data.preferences import PairFormat

        form = PairFormat(
            prompt_key=self.prompt_key,
            chosen_key=self.chosen_key,
            rejected_key=self.rejected_key,
            apply_chat_template=self.apply_chat_template,
            input_template=self.input_template,
        )
        return form.of(source)
