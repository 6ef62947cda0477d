"""Every option of the recipe, under the flat names that OpenRLHF's users know.

`--flag value` and `flag=value` mean the same. The engines' configurations are mapped from these names below; the names
of newer versions, and the flags that are not taken, are in flags.yaml.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

from agents.options import AgentOptions
from components.data.rewards import RewardSettings
from components.engines.config import RolloutConfig, SamplingConfig, TrainConfig
from training.config import ConfigError
from training.options import VLLMS_OWN, AsyncOptions, RolloutOptions

from . import flags

RECIPE = Path(__file__).parent.name

Estimator = Literal[
    "gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo", "opo", "gpg", "grpo_passk"
]
GROUPED = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo", "opo", "gpg", "grpo_passk")
"""Estimators that compare the answers to one prompt with each other."""
CRITICS_OWN = (
    *("critic_pretrain", "critic_learning_rate", "critic_num_nodes", "critic_num_gpus_per_node"),
    *("lambd", "value_clip", "freezing_actor_steps", "colocate_critic_reward", "save_value_network"),
)
"""Options that only mean something where there is a critic."""
PolicyLoss = Literal[
    "ppo", "gspo", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "reinforce"
]
BY_ANSWER = ("gspo", "sapo", "geo_mean")
"""Policy losses that are means over answers; the others are means over tokens."""
UNCLIPPED = ("sapo", "kl_cov", "reinforce")
"""Policy losses without a clip range."""
NOT_OF_RATIOS = ("geo_mean", "dppo_tv", "dppo_kl")
"""Policy losses whose clip range is not around a ratio of 1."""
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
CLIPS = ("eps_clip", "eps_clip_low_high")
CORRECTIONS_OWN = ("vllm_is_correction_type", "use_icepop")
MICRO_BATCHES = ("micro_train_batch_size", "micro_rollout_batch_size")
TOKEN_BUDGETS = ("train_max_tokens_per_gpu", "rollout_max_tokens_per_gpu")
REFERENCES_OWN = ("ref_num_nodes", "ref_num_gpus_per_node", "kl_estimator")
EVALUATIONS_OWN = ("eval_temperature", "eval_n_samples_per_prompt", "max_eval_samples")
NEED_EVALUATION = ("eval_scorer", "eval_split", "eval_steps", "best_eval_metric_key")
"""Options that are refused without an eval_dataset."""
WANDBS_OWN = ("wandb_org", "wandb_project", "wandb_group", "wandb_run_name")
"""Options that have no effect where something else is not set; a user who names one is told."""
ROLLOUTS_OWN = {name: name for name in ("temperature", "top_p", "enforce_eager", "verify_weight_sync")} | {
    "max_new_tokens": "generate_max_len",
    "engine": "rollout_engine",
    "tensor_parallel": "vllm_tensor_parallel_size",
    "gpu_memory": "vllm_gpu_memory_utilization",
    "cpu_cache_gb": "vllm_cpu_cache_gb",
    "prefix_caching": "enable_prefix_caching",
}
"""Options of sampling as the other recipes call them: as they are called here."""
AGENTS_OWN = {option.name: f"agent_{option.name.removesuffix('_s')}" for option in fields(AgentOptions)}
"""The same of agents."""
ASYNCS_OWN = {"enabled": "async_train", "queue_size": "async_queue_size", "partial_rollout": "partial_rollout"} | {
    "in_flight_prompts": "vllm_generate_batch_size"
}
"""The same of asynchronous training."""
UNLIMITED = 2**62
"""Tokens of a micro-batch that is cut by answers."""


@dataclass(kw_only=True)
class PPOConfig:
    """PPO, REINFORCE++, RLOO and GRPO with OpenRLHF's options."""

    ALIASES: ClassVar = flags.ALIASES
    REFUSED: ClassVar = flags.REFUSED

    # --- the run
    run_dir: str = field(default_factory=lambda: f"runs/{RECIPE}-{time.strftime('%Y%m%d-%H%M%S')}")
    """Folder of everything that the run writes."""
    seed: int = 42
    """Fixes the order of prompts, the samples, and the critic's first head."""
    dry_run: bool = False
    """Print the plan and start nothing."""
    print_config: bool = False
    """Print the whole configuration as YAML, and start nothing."""
    job_name: str = RECIPE
    """Name of the job in messages."""

    # --- models
    pretrain: str = ""
    """The policy to start from: a folder or hub name that `from_pretrained` takes, or `warm_start:<task>`, which
    makes and keeps a tiny demonstration model."""
    critic_pretrain: str | None = None
    """The critic's start. Default: the first `reward_pretrain`, else `pretrain` with a new head."""
    value_head_prefix: str = "score"
    """Name of the head's weights in reward models and critics."""
    attn_implementation: str | None = "auto"
    """Attention kernels: sdpa, eager, flash_attention_2, or whatever transformers takes. auto: flash_attention_2 where
    there is a GPU and the package, else null: what suits the model, mostly sdpa."""
    tokenizer_chat_template: str | None = None
    """Chat template instead of the tokenizer's own: Jinja, or a file with it. Saved with the trained policy."""
    pad_token: str | None = None
    """Token that fills short rows, for a tokenizer that names none; its end token will do."""

    # --- data
    prompt_data: str = ""
    """Training prompts: a json, jsonl, csv, parquet or arrow file, a folder of `save_to_disk` or with such files, a hub
    name (`name@data_dir` for a part of it), or `task:<name>` for a generated task; several with commas between."""
    prompt_data_probs: str | None = None
    """Shares of a mixture, one per source, as `0.7,0.3`. Default: all of one source, then all of the next."""
    prompt_split: str = "train"
    """Which split of a hub name or folder."""
    input_key: str = "input"
    """Column of the prompt: text, or a list of chat messages."""
    label_key: str | None = None
    """Column of the label that the reward sees. A task brings its own."""
    apply_chat_template: bool = False
    """Wrap each prompt as a user message of the tokenizer's chat template. Chat messages always go through it."""
    input_template: str | None = None
    """Text around each prompt, with `{}` in its place."""
    max_samples: int | None = None
    """Use at most this many training prompts. Default: all; of a generated task, which has no end, 10,000."""
    prompt_max_len: int = 1024
    """Longer prompts (in tokens) are left out, and counted."""
    generate_max_len: int = 1024
    """New tokens per answer, at most."""

    # --- reward: one of these three
    reward_pretrain: str | None = None
    """Reward model: a sequence classifier with one label and the policy's vocabulary; several with commas between."""
    remote_rm_url: str | None = None
    """Reward server's URL, several with commas between, or a Python file with
    `reward_func(queries, prompts, labels, **kwargs)`. Servers that want a bearer token are sent TROUPE_REWARD_TOKEN of
    the environment."""
    scorer: str | None = None
    """Built-in scorer: `gsm8k` (the answer after ####), `gsm8k_flexible` (the last number), `math` (equivalence by
    math-verify), `exact_match`, or a task's own."""
    reward_weights: list[float] | None = None
    """Weight of each reward model. Default: 1 each."""
    agent_func_path: str | None = None
    """A Python file with `AgentExecutor` or `AgentInstance`, or a shipped environment, as `env:guess`: answers go on as
    episodes of several turns, which their world rewards instead of the three above."""
    agent_max_turns: int = 16
    """Turns of an episode, at most."""
    agent_max_tokens: int | None = None
    """Tokens of an episode, at most: prompt, answers and feedback. Default: as many as the model has positions;
    generate_max_len limits each answer."""
    agent_stop: list[str] = field(default_factory=list)
    """Texts that end an answer of an episode; they stay part of it."""
    agent_concurrency: int = 256
    """Episodes that one engine plays at the same time."""
    agent_runs_in: Literal["loop", "thread", "process"] = "loop"
    """Where the agent's code runs: in the engine's event loop, in threads (code that blocks), or each episode in a
    process of its own (code that may hang, crash or use a core)."""
    agent_step_timeout: float = 60.0
    """Seconds that one reset or step may take before its episode ends as an error."""
    agent_max_failed_share: float = 0.1
    """Share of a batch's episodes that may end as errors; above it the run stops."""
    normalize_reward: bool = False
    """Shift and scale a reward model's rewards, and the critic's values, by the mean and std in its config.json."""
    reward_clip_range: tuple[float, float] = (-10.0, 10.0)
    """Rewards, after the comparison within groups, are cut to this range."""
    overlong_buffer_len: int | None = None
    """Answers lose reward over the last so many tokens before generate_max_len (DAPO)."""
    overlong_penalty_factor: float = 1.0
    """How much an answer of full length loses."""
    stop_properly_penalty_coef: float | None = None
    """Answers that were cut off: their reward is multiplied by this if it is 0 to 1, replaced by it if negative."""
    reward_workers: int = 1
    """Processes that run the Python file or the scorer, on each reward instance."""
    reward_timeout: float = 60.0
    """Seconds that reward code may take over one answer."""
    remote_rm_timeout: float = 180.0
    """Seconds that a reward server may take over one request; a request is tried five times."""
    remote_rm_batch_size: int = 64
    """Answers per request to a reward server."""

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
    micro_train_batch_size: int = 1
    """Answers in a forward and backward pass on one rank. Changes memory and speed, never the result."""
    micro_rollout_batch_size: int = 1
    """Answers in a pass without gradients on one rank. Changes memory and speed, never the result."""
    use_dynamic_batch: bool = False
    """Cut micro-batches by tokens instead, with the two budgets below."""
    train_max_tokens_per_gpu: int = 16192
    """Tokens in a forward and backward pass on one rank, padding included. A longer answer stands alone."""
    rollout_max_tokens_per_gpu: int | None = None
    """Tokens in a pass without gradients. Default: train_max_tokens_per_gpu."""

    # --- sampling
    temperature: float = 1.0
    """Of the training samples. Log-probabilities are taken at the same temperature."""
    top_p: float = 1.0
    """Sample from the likeliest tokens whose probabilities reach this sum. Below 1 the engine's distribution is not the
    one that is trained."""
    rollout_engine: Literal["auto", "vllm", "hf"] = "auto"
    """Who generates: `vllm`; `hf`, a loop around transformers; or `auto`: vllm where it is installed and faster, on a
    GPU or with a large model. They draw different tokens from the same seed."""
    vllm_tensor_parallel_size: int = 1
    """Devices of one engine, over which the weights are spread; on a CPU processes."""
    vllm_gpu_memory_utilization: float | None = None
    """Share of a GPU's memory for weights and cache. Default: 0.9, or 0.45 where other roles share the GPU."""
    vllm_cpu_cache_gb: float = 1.0
    """GiB of an engine's key-value cache on a CPU."""
    enforce_eager: bool = False
    """No CUDA graphs, which are slower to start and faster to run."""
    enable_prefix_caching: bool = False
    """Read the common beginning of prompts once. Changes speed, not tokens."""
    vllm_enable_sleep: bool = False
    """The engines give a GPU's memory back between generations."""
    async_train: bool = False
    """Generate the next answers while these are trained on. Not where the roles share devices."""
    async_queue_size: int = 1
    """Batches that may wait to be trained on, and so how many updates the weights that made them may be behind."""
    partial_rollout: bool = False
    """With async_train: weights change in the middle of answers, which then go on."""
    vllm_generate_batch_size: int | None = None
    """Prompts that are answered at the same time, with partial_rollout; more than rollout_batch_size: the slowest are
    carried to the next batch. Default: rollout_batch_size."""
    verify_weight_sync: bool = False
    """After each step compare a digest of every weight on both sides, and let the policy judge greedy answers of the
    engines. Costs about a step's time."""

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
    adam_eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
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
    packing_samples: bool = False
    """Lay the answers of a micro-batch end to end instead of padding them. Changes no results but for rounding."""
    deepspeed_enable_sleep: bool = False
    """Actor and critic give a GPU's memory back while answers are generated."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank (peft) instead of the weights. 0: train all."""
    lora_alpha: float = 16.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Share of an adapter's inputs that is dropped in training."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Layers that get an adapter: their names or endings, or all-linear."""
    adam_offload: bool = False
    """Keep Adam's state in host memory."""
    overlap_comm: bool = False
    """Reduce gradients while the backward pass still runs."""

    # --- algorithm
    advantage_estimator: Estimator = "gae"
    """How credit is given: `gae` with a critic; without one `reinforce` (REINFORCE++: whitened returns) and, within
    each prompt's answers, `reinforce_baseline` (less their mean, whitened), `rloo` (less the mean of the others),
    `group_norm` (GRPO), `dr_grpo` (less their mean; the loss is divided by generate_max_len, not by the tokens), `opo`
    (less their mean by length), `gpg` and `grpo_passk` (the best one's lead); docs/algorithms.md has the formulas."""
    gamma: float = 1.0
    """Discount per action token."""
    lambd: float = 1.0
    """GAE's lambda: 1 is the return minus the value, 0 the one-step error."""
    no_advantage_std_norm: bool = False
    """Whitening only centres the advantages, and leaves their scale."""
    eps_clip: float = 0.2
    """The policy ratio is clipped to 1 +- this; with geo_mean the log-ratio to +- this, in nats; with dppo_tv and
    dppo_kl it bounds the divergence."""
    eps_clip_low_high: tuple[float, float] | None = None
    """Two bounds instead: 1 - the first to 1 + the second."""
    dual_clip: float | None = None
    """A token with a negative advantage costs at most this many times it, above 1. Default: any."""
    policy_loss_type: PolicyLoss = "ppo"
    """What is clipped: `ppo` the ratio of each token, `gspo` that of the answer; docs/algorithms.md has the others."""
    loss_agg_mode: Aggregation | None = None
    """How tokens are weighed. Default: with dr_grpo seq-mean-token-sum-norm, which divides by generate_max_len; else
    with gspo, sapo and geo_mean seq-mean-token-mean; else token-mean."""
    enable_vllm_is_correction: bool = False
    """Weigh the loss of each token by the policy's probability over that of the engine which sampled it."""
    vllm_is_truncated_threshold: tuple[float, float] = (0.5, 5.0)
    """Lowest and highest such weight. What is beyond is logged as rollout/outside_share in any case."""
    vllm_is_correction_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """Weights outside: `tis` cuts them to the range, `icepop` makes them 0, `seq-mask-tis` cuts them, and makes all 0
    in an answer whose mean ratio is outside. Default: tis."""
    use_icepop: bool = False
    """Another way to say vllm_is_correction_type=icepop."""
    entropy_loss_coef: float | None = None
    """Weight of the entropy, in nats per token, that the loss rewards. It is logged in any case."""
    value_clip: float = 0.5
    """The critic may move a value by this much per step."""
    init_kl_coef: float = 0.01
    """Weight of the KL to the starting policy. 0: no reference role is started."""
    kl_target: float | None = None
    """Mean KL per token, in nats, that the weight is adapted to after each step. Default: the weight stays."""
    kl_horizon: int = 10000
    """Answers over which it may change by a fifth."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"] = "k1"
    """Which estimator of the KL; with a + its gradient is that of k2, the unbiased one."""
    use_kl_loss: bool = False
    """Put the KL into the loss instead of into the reward."""
    freezing_actor_steps: int = -1
    """The critic learns alone up to and including this step."""
    dynamic_filtering: bool = False
    """Replace prompts whose answers teach nothing, until the step is full or the data at its end."""
    dynamic_filtering_reward_range: tuple[float, float] = (0.0, 1.0)
    """Which prompts stay: their answers' mean score lies between the two, the bounds excluded."""
    enable_ema: bool = False
    """Save a moving average of the policy's weights instead of the weights. Rollouts and scores are of the weights
    themselves. It is kept in host memory, and brought up to date after every optimizer step."""
    ema_beta: float = 0.992
    """How much of the average stays at each optimizer step."""

    # --- evaluation
    eval_dataset: str | None = None
    """Held-out prompts: as prompt_data; `task:<name>` gives a task's held-out items."""
    eval_scorer: str | None = None
    """Scores held-out answers in place of the reward that is trained on: a built-in scorer, a Python file or servers'
    URLs. Their mean under that reward is logged beside it, as eval/SOURCE_reward. Default: that reward scores them."""
    eval_split: str | None = None
    """Which split of it. Default: train, as in OpenRLHF; of a task: heldout."""
    max_eval_samples: int = 2048
    """How many of them."""
    eval_steps: int = -1
    """Evaluate every so many steps; -1 only at the start and at the end."""
    eval_temperature: float = 0.6
    """Of the answers behind pass1 and passN. The run's score is taken at temperature 1 and greedy besides."""
    eval_n_samples_per_prompt: int = 4
    """N: answers per held-out prompt."""
    best_eval_metric_key: str = ""
    """The policy with the best of this metric is kept, as checkpoints/best says. Default: the first, by name, that ends
    in _pass1; `none` keeps only the last policy."""

    # --- placement
    actor_num_nodes: int = 1
    """Machines that train the policy."""
    actor_num_gpus_per_node: int | None = None
    """Ranks per machine. Default: its GPUs shared out evenly among the roles; 1 without GPUs."""
    critic_num_nodes: int = 1
    """Machines that train the critic."""
    critic_num_gpus_per_node: int | None = None
    """Ranks per machine. Default: an even share, as for the actor."""
    ref_num_nodes: int = 1
    """Machines that hold the reference."""
    ref_num_gpus_per_node: int | None = None
    """Ranks per machine. Default: an even share, as for the actor."""
    reward_num_nodes: int = 1
    """Machines that score answers."""
    reward_num_gpus_per_node: int | None = None
    """Instances per machine. They take devices where there is a reward_pretrain, and are one process otherwise."""
    vllm_num_engines: int | None = None
    """Rollout engines, of one device each. Default: an even share of the devices, as for the actor."""
    colocate_actor_ref: bool = False
    """Actor and reference share devices."""
    colocate_critic_reward: bool = False
    """Critic and reward share devices."""
    colocate_all_models: bool = False
    """All roles with a model share devices."""

    # --- checkpoints and recovery
    resume: str = "auto"
    """`auto` goes on from the latest checkpoint of run_dir (or ckpt_path) if there is one, a path from that step, run
    or folder of checkpoints; `none` begins anew, in a folder without a run."""
    save_steps: int = 10
    """A checkpoint every so many steps; -1 only of the best policy and when the training ends or is stopped."""
    ckpt_path: str | None = None
    """Folder of the checkpoints. Default: run_dir/checkpoints."""
    max_ckpt_num: int = 3
    """How many checkpoints are kept, the newest ones; the best one is kept beside."""
    max_ckpt_mem: float | None = None
    """GB that the checkpoints may take together; the oldest go first, the latest and the best never. Default: any."""
    max_restarts: int = 3
    """How often all starts again from the latest checkpoint when a trained rank dies; and how many workers of each
    other role may be replaced."""
    stall_timeout: float = 1800.0
    """Seconds without a sign of progress after which a process is ended as hung; 0: never."""
    backend: Literal["ray", "local"] = "ray"
    """Where the roles live: each in a process of its own, or all in this one, one at a time (for breakpoints)."""

    # --- output
    save_path: str | None = None
    """A second place for the trained model; it is always in the run folder's checkpoints."""
    save_value_network: bool = False
    """Save the critic beside the policy, in checkpoints/step_N/critic."""
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
        self._check_sources()
        self._check_batches()
        self._check_rewards()
        self._check_algorithm()
        self._check_evaluation()
        self._check_checkpoints()
        # The engines' own checks, before any engine starts.
        for learning_rate in (self.actor_learning_rate, self.critic_learning_rate):
            self.engine(learning_rate, steps=1)
        try:
            self.rollout.notes(())
            shared = self.colocate_all_models or self.vllm_enable_sleep or self.deepspeed_enable_sleep
            apart = "colocate_all_models=false, vllm_enable_sleep=false and deepspeed_enable_sleep=false"
            self.agent.notes(())
            self.asynchronous.check(shared, self.backend, self.rollout_batch_size, apart)
        except ValueError as error:
            raise ConfigError(self.renamed(str(error))) from error

    def _check_sources(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed}; set it to 0 or more")
        if not self.pretrain:
            raise ConfigError("pretrain is empty; set pretrain=FOLDER, or pretrain=warm_start:sort for a demonstration")
        if not self.prompt_data:
            raise ConfigError("prompt_data is empty; set prompt_data=FILE, or prompt_data=task:sort")
        if self.input_template is not None and self.apply_chat_template:
            raise ConfigError("apply_chat_template and input_template exclude each other; unset one of them")
        if self.input_template is not None and self.input_template.count("{}") != 1:
            raise ConfigError(f"input_template={self.input_template!r} must hold {{}} once, where the prompt goes")
        if self.colocate_all_models and (self.colocate_actor_ref or self.colocate_critic_reward):
            raise ConfigError("colocate_all_models includes the other two; set it alone")
        if self.colocate_actor_ref and not self.needs_reference:
            raise ConfigError("colocate_actor_ref=true, but with init_kl_coef=0 there is no reference; unset one")
        if self.colocate_critic_reward and not self.reward_pretrain:
            raise ConfigError("colocate_critic_reward=true, but only a reward_pretrain takes a device; unset it")
        self._at_least_one("actor_num_nodes", "critic_num_nodes", "ref_num_nodes", "reward_num_nodes")
        self._at_least_one("actor_num_gpus_per_node", "critic_num_gpus_per_node", "ref_num_gpus_per_node")
        self._at_least_one("reward_num_gpus_per_node", "vllm_num_engines", "max_samples", "prompt_max_len")

    def _check_batches(self) -> None:
        self._at_least_one("rollout_batch_size", "n_samples_per_prompt", "train_batch_size", "max_epochs")
        self._at_least_one("num_episodes", "micro_train_batch_size", "micro_rollout_batch_size")
        self._at_least_one("train_max_tokens_per_gpu", "rollout_max_tokens_per_gpu")
        samples = self.rollout_batch_size * self.n_samples_per_prompt
        if samples % self.train_batch_size:
            raise ConfigError(
                f"a step makes {self.rollout_batch_size} x {self.n_samples_per_prompt} = {samples} answers, which "
                f"train_batch_size={self.train_batch_size} does not divide; set one that does"
            )
        for role, count in self.ranks.items():
            if self.train_batch_size < count:
                raise ConfigError(
                    f"train_batch_size={self.train_batch_size} leaves some of the {count} {role} ranks without an "
                    f"answer; raise it, or lower {role}_num_gpus_per_node"
                )

    def _check_rewards(self) -> None:
        names = ("reward_pretrain", "remote_rm_url", "scorer", "agent_func_path")
        given = {name: getattr(self, name) for name in names}
        if sum(value is not None for value in given.values()) != 1:
            shown = ", ".join(f"{name}={value}" for name, value in given.items())
            raise ConfigError(f"{shown}: set exactly one of the four, the others to null")
        models = self.reward_models
        if self.reward_weights is not None and len(self.reward_weights) != len(models):
            raise ConfigError(f"reward_weights has {len(self.reward_weights)} numbers for {len(models)} reward models")
        if self.normalize_reward and not models:
            raise ConfigError(
                "normalize_reward uses the mean and std of a reward_pretrain; normalise in your own reward code or "
                "reward server, and leave it out here"
            )
        low, high = self.reward_clip_range
        if not low < high:
            raise ConfigError(f"reward_clip_range={low} {high}; set the lower bound first")
        buffer = self.overlong_buffer_len
        if buffer is not None and not 0 < buffer <= self.generate_max_len:
            raise ConfigError(f"overlong_buffer_len={buffer}; set 1 to generate_max_len={self.generate_max_len}")
        if buffer is not None and self.agent_func_path:
            raise ConfigError(
                "overlong_buffer_len is about one answer, and agent_func_path plays episodes of several; unset one"
            )
        if self.overlong_penalty_factor < 0:
            raise ConfigError(f"overlong_penalty_factor={self.overlong_penalty_factor}; set it to 0 or more")
        if self.stop_properly_penalty_coef is not None and self.stop_properly_penalty_coef > 1:
            raise ConfigError(f"stop_properly_penalty_coef={self.stop_properly_penalty_coef}; set it to at most 1")
        self._at_least_one("reward_workers", "remote_rm_batch_size")
        for name in ("reward_timeout", "remote_rm_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)}; set it to a number of seconds above 0")

    def _check_algorithm(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(f"temperature={self.temperature}; training needs samples, so set it above 0")
        estimator = self.advantage_estimator
        if estimator in GROUPED and self.n_samples_per_prompt < 2:
            raise ConfigError(
                f"advantage_estimator={estimator} compares the answers to one prompt, but n_samples_per_prompt="
                f"{self.n_samples_per_prompt}; set it to 2 or more"
            )
        if estimator in GROUPED and self.gamma != 1.0:
            raise ConfigError(
                f"advantage_estimator={estimator} knows no discount, but gamma={self.gamma}; leave it out"
            )
        if estimator in GROUPED and estimator != "reinforce_baseline" and self.no_advantage_std_norm:
            raise ConfigError(f"advantage_estimator={estimator} does not whiten; leave no_advantage_std_norm out")
        if self.init_kl_coef < 0:
            raise ConfigError(f"init_kl_coef={self.init_kl_coef}; set it to 0 or more")
        if self.use_kl_loss and not self.needs_reference:
            raise ConfigError("use_kl_loss=true, but init_kl_coef=0; set a weight, or leave use_kl_loss out")
        if self.entropy_loss_coef is not None and self.entropy_loss_coef < 0:
            raise ConfigError(f"entropy_loss_coef={self.entropy_loss_coef}; set it to 0 or more")
        for low, high in ((self.eps_clip, self.eps_clip), self.eps_clip_low_high or (0.0, 0.0)):
            if not 0 <= low <= (1 if self.policy_loss_type not in NOT_OF_RATIOS else float("inf")) or high < 0:
                raise ConfigError(f"the ratio cannot be clipped to 1 - {low} and 1 + {high}; see eps_clip")
        if self.dual_clip is not None and (self.dual_clip <= 1 or self.policy_loss_type != "ppo"):
            raise ConfigError(f"dual_clip={self.dual_clip}; set it above 1, with policy_loss_type=ppo")
        enough = self.kl_horizon > self.rollout_batch_size * self.n_samples_per_prompt / 5
        if self.kl_target is not None and not (self.kl_target > 0 and enough and self.needs_reference):
            raise ConfigError(
                f"kl_target={self.kl_target}, kl_horizon={self.kl_horizon}, init_kl_coef={self.init_kl_coef}; an "
                "adapted weight needs all three above 0, and more than a fifth of a step's answers as its horizon"
            )
        if not 0 <= self.ema_beta < 1:
            raise ConfigError(f"ema_beta={self.ema_beta}; set it to 0 or more and less than 1")
        self._check_sampling()

    def _check_sampling(self) -> None:
        low, high = self.dynamic_filtering_reward_range
        if self.dynamic_filtering and (self.n_samples_per_prompt < 2 or not low < high):
            raise ConfigError(
                f"dynamic_filtering with n_samples_per_prompt={self.n_samples_per_prompt} and "
                f"dynamic_filtering_reward_range={low} {high}; set 2 or more answers, and the lower bound first"
            )
        if self.dynamic_filtering and self.partial_rollout:
            raise ConfigError(
                "dynamic_filtering replaces prompts of a step, and partial_rollout carries some to the next; unset one"
            )
        low, high = self.vllm_is_truncated_threshold
        if not 0 <= low < high:
            raise ConfigError(f"vllm_is_truncated_threshold={low} {high}; set two ratios, the lower first")
        if self.use_icepop and self.vllm_is_correction_type not in (None, "icepop"):
            raise ConfigError(f"use_icepop=true and vllm_is_correction_type={self.vllm_is_correction_type}; unset one")

    def _check_evaluation(self) -> None:
        self._at_least_one("max_eval_samples", "eval_n_samples_per_prompt")
        if self.eval_dataset is None:
            changed = [name for name in NEED_EVALUATION if not self._is_default(name)]
            if changed:
                raise ConfigError(f"{', '.join(changed)} without eval_dataset; set eval_dataset, or leave them out")
        if self.eval_scorer is not None and self.agent_func_path is not None:
            raise ConfigError(
                f"eval_scorer={self.eval_scorer}, but an agent's world scores all of its episodes; unset one"
            )
        if self.eval_steps == 0 or self.eval_steps < -1:
            raise ConfigError(f"eval_steps={self.eval_steps}; set 1 or more, or -1 for the start and the end only")
        if self.eval_temperature < 0:
            raise ConfigError(f"eval_temperature={self.eval_temperature}; set it to 0 or more")
        if self.eval_temperature == 0 and self.eval_n_samples_per_prompt > 1:
            raise ConfigError("eval_temperature=0 gives the same answer every time; set eval_n_samples_per_prompt=1")

    def _check_checkpoints(self) -> None:
        self._at_least_one("max_ckpt_num")
        if self.save_steps == 0 or self.save_steps < -1:
            raise ConfigError(f"save_steps={self.save_steps}; set 1 or more, or -1 for the best and the last step only")
        if self.max_ckpt_mem is not None and not self.max_ckpt_mem > 0:
            raise ConfigError(f"max_ckpt_mem={self.max_ckpt_mem}; set a number of GB above 0, or leave it out")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts={self.max_restarts}; set it to 0 or more")

    def check_given(self, given: Collection[str]) -> None:
        """Refuse options that a user has named and that have no effect beside the others.

        Raises:
            ConfigError: a critic's option without a critic.
        """
        idle = [f"{name}={getattr(self, name)}" for name in CRITICS_OWN if name in given]
        if idle and not self.needs_critic:
            raise ConfigError(
                f"advantage_estimator={self.advantage_estimator} trains no critic, so {', '.join(idle)} would have no "
                "effect; leave it out, or set advantage_estimator=gae"
            )

    def _at_least_one(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}; set it to at least 1")

    def _is_default(self, name: str) -> bool:
        return getattr(self, name) == next(option.default for option in fields(self) if option.name == name)

    @property
    def ranks(self) -> dict[str, int]:
        """How many processes train each model, where that was said."""
        return {
            "actor": self.actor_num_nodes * (self.actor_num_gpus_per_node or 1),
            "critic": self.critic_num_nodes * (self.critic_num_gpus_per_node or 1),
        }

    @property
    def nodes(self) -> int:
        """Machines, at most; roles may share them."""
        return max(self.actor_num_nodes, self.critic_num_nodes, self.ref_num_nodes, self.reward_num_nodes)

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL to measure."""
        return self.init_kl_coef != 0

    @property
    def needs_critic(self) -> bool:
        """Whether values are learnt."""
        return self.advantage_estimator == "gae"

    @property
    def frozen_steps(self) -> int:
        """Up to and including this step the policy waits for the critic."""
        return self.freezing_actor_steps if self.needs_critic else -1

    @property
    def reward_models(self) -> list[str]:
        """The reward models' folders or names; empty where code or a server scores."""
        return [name.strip() for name in (self.reward_pretrain or "").split(",") if name.strip()]

    @property
    def critic_start(self) -> str:
        """What the critic is loaded from."""
        return self.critic_pretrain or next(iter(self.reward_models), self.pretrain)

    @property
    def aggregation(self) -> Aggregation:
        """How tokens are weighed in the policy's loss."""
        if self.advantage_estimator == "dr_grpo":
            return self.loss_agg_mode or "seq-mean-token-sum-norm"
        return self.loss_agg_mode or ("seq-mean-token-mean" if self.policy_loss_type in BY_ANSWER else "token-mean")

    @property
    def correction(self) -> Literal["tis", "icepop", "seq-mask-tis"]:
        """How weights outside their range are treated, where the loss is corrected."""
        return "icepop" if self.use_icepop else self.vllm_is_correction_type or "tis"

    @property
    def corrects_loss(self) -> bool:
        """Whether the loss of each token has a weight. gspo corrects its ratio instead."""
        return self.enable_vllm_is_correction and self.policy_loss_type != "gspo"

    @property
    def old_policy(self) -> Literal["logprob", "rollout_logprob"]:
        """Whose log-probabilities the ratio starts from: the trainer's, or the engine's in a corrected gspo."""
        corrected = self.enable_vllm_is_correction and not self.corrects_loss
        return "rollout_logprob" if corrected else "logprob"

    @property
    def clip_low_high(self) -> tuple[float, float]:
        """How far the policy ratio may go below and above 1."""
        return self.eps_clip_low_high or (self.eps_clip, self.eps_clip)

    @property
    def reward_code(self) -> str | None:
        """The scorer's name, the reward file or the servers' URLs; None where reward models score."""
        return self.scorer or self.remote_rm_url

    def steps(self, num_prompts: int, episodes: int | None = None) -> int:
        """Rollout steps of the whole run, or of so many episodes; filtered prompts may leave less for the last one."""
        total = num_prompts * (episodes or self.num_episodes)
        return (total + self.dynamic_filtering * (self.rollout_batch_size - 1)) // self.rollout_batch_size

    def optimizer_steps(self, steps: int) -> int:
        """Optimizer steps of `steps` rollout steps."""
        return steps * self.max_epochs * (self.rollout_batch_size * self.n_samples_per_prompt // self.train_batch_size)

    def arithmetic(self, num_prompts: int) -> str:
        """How much of what a run does, in a sentence."""
        steps = self.steps(num_prompts)
        unused = max(num_prompts * self.num_episodes - steps * self.rollout_batch_size, 0)
        at_most = "at most " if self.dynamic_filtering else ""
        return (
            f"{at_most}{steps} steps of {self.rollout_batch_size} prompts x {self.n_samples_per_prompt} answers, "
            f"{self.optimizer_steps(1)} optimizer steps of {self.train_batch_size} answers each"
            + (f"; the last {unused} prompts fill no step and are not used" if unused else "")
        )

    def notes(self, given: Collection[str]) -> list[str]:
        """What a user who has named the options `given` should know of before the run starts."""
        found = []
        if self.needs_reference and self.use_kl_loss == (self.kl_estimator in ("k1", "abs")):
            advice = "k2, k3 or one with a + suits a loss" if self.use_kl_loss else "k1 suits a reward"
            found.append(f"kl_estimator={self.kl_estimator} with use_kl_loss={self.use_kl_loss}: {advice}")
        if self.dynamic_filtering and self.reward_models and "dynamic_filtering_reward_range" not in given:
            found.append("dynamic_filtering looks for mean scores from 0 to 1; a reward_pretrain's may be any number")
        sources = [source for source in (self.reward_code, self.eval_scorer) if source is not None]
        asks_server = any("://" in source for source in sources)
        runs_code = any("://" not in source for source in sources)
        idle: list[tuple[object, str, tuple[str, ...]]] = [
            (self.use_dynamic_batch, "use_dynamic_batch cuts by tokens", MICRO_BATCHES),
            (not self.use_dynamic_batch, "use_dynamic_batch is off", TOKEN_BUDGETS),
            (not self.needs_reference, "init_kl_coef=0 needs no reference", REFERENCES_OWN),
            (self.eval_dataset is None, "there is no eval_dataset", EVALUATIONS_OWN),
            (not runs_code, "no reward code is run", ("reward_workers", "reward_timeout")),
            (not asks_server, "no server is asked", ("remote_rm_timeout", "remote_rm_batch_size")),
            (not self.reward_models, "there is no reward_pretrain", ("reward_weights",)),
            (self.overlong_buffer_len is None, "overlong_buffer_len is not set", ("overlong_penalty_factor",)),
            (self.eps_clip_low_high, "eps_clip_low_high is set", ("eps_clip",)),
            (self.policy_loss_type in UNCLIPPED, f"{self.policy_loss_type} clips no ratio", CLIPS),
            (not self.enable_vllm_is_correction, "enable_vllm_is_correction is off", CORRECTIONS_OWN),
            (self.old_policy != "logprob", "gspo corrects its ratio itself", CORRECTIONS_OWN),
            (self.kl_target is None, "there is no kl_target", ("kl_horizon",)),
            (not self.dynamic_filtering, "dynamic_filtering is off", ("dynamic_filtering_reward_range",)),
            (not self.enable_ema, "enable_ema is off", ("ema_beta",)),
            (self.use_wandb is None, "use_wandb is off", WANDBS_OWN),
            (self.lora_rank == 0, "lora_rank=0", ("lora_alpha", "lora_dropout", "target_modules")),
            (
                self.rollout_engine == "hf",
                "hf generates",
                tuple(ROLLOUTS_OWN[name] for name in VLLMS_OWN),
            ),
        ]
        for is_idle, why, names in idle:
            named = [name for name in names if name in given]
            if is_idle and named:
                found.append(f"no effect of {', '.join(named)}: {why}")
        own = {f"agent.{name}" for name, here in AGENTS_OWN.items() if here in given}
        own |= {f"asynchronous.{name}" for name, here in ASYNCS_OWN.items() if here in given}
        notes = [*self.rollout.notes(()), *self.agent.notes(own, self.rollout_engine)]
        notes += self.asynchronous.notes(own, "enable_vllm_is_correction=true", self.enable_vllm_is_correction)
        return found + [self.renamed(note) for note in notes]

    def engine(self, learning_rate: float, steps: int, averaged: bool = False) -> TrainConfig:
        """The training engine of a role whose rollout steps number `steps`; `averaged` keeps a moving average."""
        return TrainConfig(
            zero_stage=self.zero_stage,
            precision="bf16" if self.bf16 else "fp32",
            learning_rate=learning_rate,
            betas=self.adam_betas,
            eps=self.adam_eps,
            weight_decay=self.l2,
            max_norm=self.max_norm,
            lr_scheduler=self.lr_scheduler,
            lr_warmup_ratio=self.lr_warmup_ratio,
            min_lr_ratio=self.min_lr_ratio,
            total_steps=self.optimizer_steps(steps),
            max_tokens=self.train_max_tokens_per_gpu if self.use_dynamic_batch else UNLIMITED,
            max_sequences=0 if self.use_dynamic_batch else self.micro_train_batch_size,
            forward_max_tokens=self.forward_limits[0],
            forward_max_sequences=self.forward_limits[1],
            gradient_checkpointing=self.gradient_checkpointing,
            adam_offload=self.adam_offload,
            overlap_comm=self.overlap_comm,
            packing=self.packing_samples,
            lora_rank=self.lora_rank,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            lora_target_modules=",".join(self.target_modules),
            ema_beta=self.ema_beta if averaged else None,
            seed=self.seed,
        )

    @property
    def forward_limits(self) -> tuple[int, int]:
        """Tokens and answers of a pass without gradients; 0 answers sets no limit."""
        if self.use_dynamic_batch:
            return self.rollout_max_tokens_per_gpu or self.train_max_tokens_per_gpu, 0
        return UNLIMITED, self.micro_rollout_batch_size

    @property
    def checkpoint_dir(self) -> Path:
        """Where the step folders are."""
        return Path(self.ckpt_path).expanduser() if self.ckpt_path else Path(self.run_dir) / "checkpoints"

    @property
    def max_ckpt_bytes(self) -> float:
        """What the checkpoints may take together."""
        return float("inf") if self.max_ckpt_mem is None else self.max_ckpt_mem * 1e9

    @property
    def dtype(self) -> str:
        """Of models that are not trained."""
        return "bfloat16" if self.bf16 else "float32"

    @property
    def rollout(self) -> RolloutOptions:
        """How answers are sampled, as the group of options that recipes share."""
        return RolloutOptions(**{name: getattr(self, own) for name, own in ROLLOUTS_OWN.items()})

    @property
    def agent(self) -> AgentOptions:
        """How answers go on as episodes."""
        return AgentOptions(**{name: getattr(self, own) for name, own in AGENTS_OWN.items()})

    @property
    def asynchronous(self) -> AsyncOptions:
        """How generation and training overlap."""
        return AsyncOptions(**{name: getattr(self, own) for name, own in ASYNCS_OWN.items()})

    @staticmethod
    def renamed(text: str) -> str:
        """A sentence about these groups, in the names of this recipe."""
        groups = {"rollout": ROLLOUTS_OWN, "agent": AGENTS_OWN, "asynchronous": ASYNCS_OWN}
        for group, names in groups.items():
            for name, own in names.items():
                text = text.replace(f"{group}.{name}", own)
        return text

    def engine_config(self) -> RolloutConfig:
        """The engine of a rollout instance."""
        longest = self.agent.longest_prompt(self.prompt_max_len, self.generate_max_len)
        return self.rollout.engine_config(self.dtype, longest, self.colocate_all_models, sleeps=self.vllm_enable_sleep)

    def sampling(self, step: int, temperature: float | None = None) -> SamplingConfig:
        """How samples of a step are drawn: those that are trained on, or at another temperature."""
        return self.rollout.sampling(self.seed, step, temperature)

    def reward_settings(self) -> RewardSettings:
        """How reward code and reward servers are used."""
        return RewardSettings(
            workers=self.reward_workers,
            timeout_s=self.reward_timeout,
            url_timeout_s=self.remote_rm_timeout,
            url_batch_size=self.remote_rm_batch_size,
        )
