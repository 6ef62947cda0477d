"""Every option of the recipe, under the flat names that OpenRLHF's users know.

`--flag value` and `flag=value` mean the same. The engines' configurations are mapped from these names below.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from components.engines.config import DeepSpeedConfig, HFRolloutConfig, SamplingConfig
from core import ConfigError

RECIPE = Path(__file__).parent.name


@dataclass(kw_only=True)
class PPOConfig:
    """PPO on verifiable prompts."""

    # --- the run
    run_dir: str = field(default_factory=lambda: f"runs/{RECIPE}-{time.strftime('%Y%m%d-%H%M%S')}")
    """Folder of everything that the run writes."""
    seed: int = 42
    """Fixes the order of prompts, the samples, and the critic's first head."""
    dry_run: bool = False
    """Print the plan and start nothing."""
    job_name: str = RECIPE
    """Name of the job in messages."""

    # --- models
    pretrain: str = ""
    """The policy to start from: a folder or hub name that `from_pretrained` takes, or `warm_start:<task>`, which
    makes and keeps a tiny demonstration model."""
    critic_pretrain: str | None = None
    """The critic's backbone. Default: `pretrain`."""

    # --- data
    prompt_data: str = ""
    """Training prompts: a json, jsonl or parquet file, or `task:<name>` for a generated task."""
    input_key: str = "input"
    """Column of the prompt."""
    label_key: str | None = None
    """Column of the label that the reward sees. A task brings its own."""
    apply_chat_template: bool = False
    """Wrap each prompt as a user message of the tokenizer's chat template."""
    input_template: str | None = None
    """Text around each prompt, with `{}` in its place."""
    max_samples: int = 100_000
    """Use at most this many training prompts."""
    prompt_max_len: int = 1024
    """Longer prompts (in tokens) are left out, and counted."""
    generate_max_len: int = 1024
    """New tokens per answer, at most."""

    # --- reward
    remote_rm_url: str | None = None
    """A Python file with `reward_func(queries, prompts, labels, **kwargs)`."""
    scorer: str | None = None
    """Or a built-in scorer by name, such as a task's own."""

    # --- how much
    rollout_batch_size: int = 1024
    """Prompts per step."""
    n_samples_per_prompt: int = 1
    """Answers per prompt."""
    train_batch_size: int = 128
    """Answers per optimizer step, over all ranks."""
    max_epochs: int = 1
    """Passes over each step's answers."""
    num_episodes: int = 1
    """Passes over the prompts."""
    max_tokens_per_gpu: int = 16192
    """Token budget of a micro-batch on one rank. Changes memory and speed, never the result."""

    # --- sampling
    temperature: float = 1.0
    """Of the training samples. Log-probabilities are taken at the same temperature."""

    # --- optimisation
    actor_learning_rate: float = 1e-6
    """Peak learning rate of the policy."""
    critic_learning_rate: float = 9e-6
    """Peak learning rate of the critic."""
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

    # --- algorithm
    advantage_estimator: Literal["gae"] = "gae"
    """How credit is given to tokens. Only GAE so far: the field lets commands that name it run, and refuses others."""
    gamma: float = 1.0
    """Discount per action token."""
    lambd: float = 1.0
    """GAE's lambda: 1 is the return minus the value, 0 the one-step error."""
    no_advantage_std_norm: bool = False
    """Whitening only centres the advantages, and leaves their scale."""
    eps_clip: float = 0.2
    """The policy ratio is clipped to 1 +- this."""
    value_clip: float = 0.5
    """The critic may move a value by this much per step."""
    init_kl_coef: float = 0.01
    """Weight of the KL to the starting policy. 0: no reference role is started."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Which estimator of the KL."""
    use_kl_loss: bool = False
    """Put the KL into the loss instead of into the reward."""
    freezing_actor_steps: int = -1
    """The critic learns alone up to and including this step."""

    # --- evaluation
    eval_dataset: str | None = None
    """Held-out prompts: a file, or `task:<name>` for a task's held-out items."""
    max_eval_samples: int = 2048
    """How many of them."""
    eval_steps: int = -1
    """Evaluate every so many steps; -1 only at the start and at the end."""

    # --- placement
    actor_num_nodes: int = 1
    """Machines that train the policy."""
    actor_num_gpus_per_node: int | None = None
    """Ranks per machine. Default: what the machine has."""
    critic_num_nodes: int = 1
    """Machines that train the critic."""
    critic_num_gpus_per_node: int | None = None
    """Ranks per machine."""
    ref_num_nodes: int = 1
    """Machines that hold the reference."""
    ref_num_gpus_per_node: int | None = None
    """Ranks per machine."""
    reward_num_nodes: int = 1
    """Machines that score answers."""
    reward_num_gpus_per_node: int | None = None
    """Instances per machine."""
    vllm_num_engines: int | None = None
    """Rollout engines."""
    colocate_actor_ref: bool = False
    """Actor and reference share devices."""
    colocate_critic_reward: bool = False
    """Critic and reward share devices."""
    colocate_all_models: bool = False
    """All roles but the trainer share devices."""

    # --- output
    save_path: str | None = None
    """A second place for the trained model; it is always in the run folder's checkpoints."""
    use_wandb: str | None = None
    """Log to W&B: an API key, or `true` to use WANDB_API_KEY. Without a key it stays offline, in the run folder."""
    wandb_project: str = "troupe"
    """W&B project."""
    wandb_group: str | None = None
    """W&B group."""
    wandb_run_name: str | None = None
    """W&B run. Default: the run folder's name."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed}; set it to 0 or more")
        if not self.pretrain:
            raise ConfigError("pretrain is empty; set pretrain=FOLDER, or pretrain=warm_start:sort for a demonstration")
        if not self.prompt_data:
            raise ConfigError("prompt_data is empty; set prompt_data=FILE, or prompt_data=task:sort")
        if (self.remote_rm_url is None) == (self.scorer is None):
            given = f"remote_rm_url={self.remote_rm_url} and scorer={self.scorer}"
            raise ConfigError(f"{given}: set exactly one of remote_rm_url=FILE.py and scorer=NAME, the other to null")
        samples = self.rollout_batch_size * self.n_samples_per_prompt
        if samples % self.train_batch_size:
            raise ConfigError(
                f"a step makes {self.rollout_batch_size} x {self.n_samples_per_prompt} = {samples} answers, which "
                f"train_batch_size={self.train_batch_size} does not divide; set one that does"
            )
        if self.temperature <= 0:
            raise ConfigError(f"temperature={self.temperature}; training needs samples, so set it above 0")
        for name in ("rollout_batch_size", "n_samples_per_prompt", "train_batch_size", "max_epochs", "num_episodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; set it to at least 1")
        # The engines' own checks, before any engine starts.
        for learning_rate in (self.actor_learning_rate, self.critic_learning_rate):
            self.engine(learning_rate, steps=1, has_gpu=False)
        self.sampling(step=0)
        if self.colocate_all_models and (self.colocate_actor_ref or self.colocate_critic_reward):
            raise ConfigError("colocate_all_models includes the other two; set it alone")

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL to measure."""
        return self.init_kl_coef != 0

    @property
    def kl_in_reward(self) -> float:
        """Weight of the KL inside the reward."""
        return 0.0 if self.use_kl_loss else self.init_kl_coef

    @property
    def reward(self) -> str:
        """The scorer's name, or the reward file."""
        return self.scorer or self.remote_rm_url or ""

    def steps(self, num_prompts: int) -> int:
        """Rollout steps of the whole run."""
        return num_prompts * self.num_episodes // self.rollout_batch_size

    def optimizer_steps(self, steps: int) -> int:
        """Optimizer steps of `steps` rollout steps."""
        return steps * self.max_epochs * (self.rollout_batch_size * self.n_samples_per_prompt // self.train_batch_size)

    def arithmetic(self, num_prompts: int) -> str:
        """How much of what a run does, in a sentence."""
        steps = self.steps(num_prompts)
        unused = num_prompts * self.num_episodes - steps * self.rollout_batch_size
        return (
            f"{steps} steps of {self.rollout_batch_size} prompts x {self.n_samples_per_prompt} answers, "
            f"{self.optimizer_steps(1)} optimizer steps of {self.train_batch_size} answers each"
            + (f"; the last {unused} prompts fill no step and are not used" if unused else "")
        )

    def engine(self, learning_rate: float, steps: int, has_gpu: bool) -> DeepSpeedConfig:
        """The training engine of a role whose rollout steps number `steps`."""
        bf16 = has_gpu if self.bf16 is None else self.bf16
        return DeepSpeedConfig(
            zero_stage=self.zero_stage,
            precision="bf16" if bf16 else "fp32",
            learning_rate=learning_rate,
            betas=self.adam_betas,
            weight_decay=self.l2,
            max_norm=self.max_norm,
            lr_scheduler=self.lr_scheduler,
            lr_warmup_ratio=self.lr_warmup_ratio,
            min_lr_ratio=self.min_lr_ratio,
            total_steps=self.optimizer_steps(steps),
            max_tokens=self.max_tokens_per_gpu,
            adam_offload=self.adam_offload,
            seed=self.seed,
        )

    def rollout_engine(self, has_gpu: bool) -> HFRolloutConfig:
        """The engine of a rollout instance."""
        return HFRolloutConfig(dtype="bfloat16" if (has_gpu if self.bf16 is None else self.bf16) else "float32")

    def sampling(self, step: int) -> SamplingConfig:
        """How training samples of a step are drawn."""
        return SamplingConfig(
            temperature=self.temperature, max_new_tokens=self.generate_max_len, seed=self.seed, step=step
        )
