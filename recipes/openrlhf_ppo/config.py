"""Every option of the recipe, under the flat names that OpenRLHF's users know.

`--flag value` and `flag=value` mean the same. options.py has the same options in the groups that recipes share; the
names of newer versions, and the flags that are not taken, are in flags.yaml.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from training.options import RunOptions, new_run_dir
from training.rl_options import without_effect
from training.schema import ConfigError

from . import flags
from .options import renamed, shared_options

RECIPE = Path(__file__).parent.name

Estimator = Literal[
    "gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo", "opo", "gpg", "grpo_passk"
]
GROUPED = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo", "opo", "gpg", "grpo_passk")
"""Estimators that compare the responses to one prompt with each other."""
CRITICS_OWN = (
    *("critic_pretrain", "critic_learning_rate", "critic_num_nodes", "critic_num_gpus_per_node"),
    *("lambd", "value_clip", "freezing_actor_steps", "colocate_critic_reward", "save_value_network"),
)
"""Options that only mean something where there is a critic."""
PolicyLoss = Literal[
    "ppo", "gspo", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "reinforce"
]
BY_RESPONSE = ("gspo", "sapo", "geo_mean")
"""Policy losses that are means over responses; the others are means over tokens."""
UNCLIPPED = ("sapo", "kl_cov", "reinforce")
"""Policy losses without a clip range."""
NOT_OF_RATIOS = ("geo_mean", "dppo_tv", "dppo_kl")
"""Policy losses whose clip range is not around a ratio of 1."""
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
CLIPS = ("eps_clip", "eps_clip_low_high")
CORRECTIONS_OWN = ("vllm_is_correction_type", "use_icepop")
MICRO_BATCHES = ("micro_train_batch_size", "micro_rollout_batch_size")
TOKEN_BUDGETS = ("train_max_tokens_per_gpu", "rollout_max_tokens_per_gpu")
WANDBS_OWN = ("wandb_org", "wandb_project", "wandb_group", "wandb_run_name")
NODES = ("actor_num_nodes", "critic_num_nodes", "ref_num_nodes", "reward_num_nodes")
RANKS = ("actor_num_gpus_per_node", "critic_num_gpus_per_node", "ref_num_gpus_per_node", "reward_num_gpus_per_node")
BATCHES = ("rollout_batch_size", "n_samples_per_prompt", "train_batch_size", "max_epochs")
COUNTS = (*NODES, *RANKS, "vllm_num_engines", *BATCHES, *MICRO_BATCHES, *TOKEN_BUDGETS)
"""Options that are at least 1; those that stand in a group are looked at there."""


@dataclass(kw_only=True)
class PPOConfig(RunOptions):
    """PPO, REINFORCE++, RLOO and GRPO with OpenRLHF's options."""

    ALIASES: ClassVar = flags.ALIASES
    REFUSED: ClassVar = flags.REFUSED

    # --- the run
    run_dir: str = field(default_factory=lambda: new_run_dir(RECIPE))
    """Folder of everything that the run writes."""
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
    """New tokens per response, at most."""

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
    """A Python file with `AgentExecutor` or `AgentInstance`, or a shipped environment, as `env:guess`: a prompt
    begins an episode of several turns, which the environment rewards instead of the three above."""
    agent_max_turns: int = 16
    """Turns of an episode, at most."""
    agent_max_tokens: int | None = None
    """Tokens of an episode, at most: prompt, responses and feedback. Default: as many as the model has positions;
    generate_max_len limits each response."""
    agent_stop: list[str] = field(default_factory=list)
    """Texts that end a response of an episode; they stay part of it."""
    agent_concurrency: int = 256
    """Episodes that one engine runs at the same time."""
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
    """Responses lose reward over the last so many tokens before generate_max_len (DAPO)."""
    overlong_penalty_factor: float = 1.0
    """How much a response of full length loses."""
    stop_properly_penalty_coef: float | None = None
    """Responses that were cut off: their reward is multiplied by this if it is 0 to 1, replaced by it if negative."""
    reward_workers: int = 1
    """Processes that run the Python file or the scorer, on each reward instance."""
    reward_timeout: float = 60.0
    """Seconds that reward code may take over one response."""
    remote_rm_timeout: float = 180.0
    """Seconds that a reward server may take over one request; a request is tried five times."""
    remote_rm_batch_size: int = 64
    """Responses per request to a reward server."""

    # --- how much
    rollout_batch_size: int = 1024
    """Prompts per step."""
    n_samples_per_prompt: int = 1
    """Responses per prompt."""
    train_batch_size: int = 128
    """Responses per optimizer step, over all ranks."""
    max_epochs: int = 1
    """Passes over each step's responses."""
    num_episodes: int = 1
    """Passes over the prompts."""
    micro_train_batch_size: int = 1
    """Responses in a forward and backward pass on one rank. Changes memory and speed, never the result."""
    micro_rollout_batch_size: int = 1
    """Responses in a pass without gradients on one rank. Changes memory and speed, never the result."""
    use_dynamic_batch: bool = False
    """Cut micro-batches by tokens instead, with the two budgets below."""
    train_max_tokens_per_gpu: int = 16192
    """Tokens in a forward and backward pass on one rank, padding included. A longer response stands alone."""
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
    """Generate the next responses while these are trained on. Not where the roles share devices."""
    async_queue_size: int = 1
    """Batches that may wait to be trained on, and so how many updates the weights that made them may be behind."""
    partial_rollout: bool = False
    """With async_train: weights change in the middle of responses, which then continue."""
    vllm_generate_batch_size: int | None = None
    """Prompts whose responses are generated at the same time, with partial_rollout; more than rollout_batch_size: the
    slowest are carried to the next batch. Default: rollout_batch_size."""
    verify_weight_sync: bool = False
    """After each step compare a digest of every weight on both sides, and let the policy score greedy responses of the
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
    """Lay the responses of a micro-batch end to end instead of padding them. Changes no results but for rounding."""
    deepspeed_enable_sleep: bool = False
    """Actor and critic give a GPU's memory back while responses are generated."""
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
    each prompt's responses, `reinforce_baseline` (less their mean, whitened), `rloo` (less the mean of the others),
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
    """What is clipped: `ppo` the ratio of each token, `gspo` that of the response; docs/algorithms.md has the rest."""
    loss_agg_mode: Aggregation | None = None
    """How tokens are weighed. Default: with dr_grpo seq-mean-token-sum-norm, which divides by generate_max_len; else
    with gspo, sapo and geo_mean seq-mean-token-mean; else token-mean."""
    enable_vllm_is_correction: bool = False
    """Weigh the loss of each token by the policy's probability over that of the engine which sampled it."""
    vllm_is_truncated_threshold: tuple[float, float] = (0.5, 5.0)
    """Lowest and highest such weight. What is beyond is logged as rollout/outside_share in any case."""
    vllm_is_correction_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """Weights outside: `tis` cuts them to the range, `icepop` makes them 0, `seq-mask-tis` cuts them, and makes all 0
    in a response whose mean ratio is outside. Default: tis."""
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
    """Responses over which it may change by a fifth."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"] = "k1"
    """Which estimator of the KL; with a + its gradient is that of k2, the unbiased one."""
    use_kl_loss: bool = False
    """Put the KL into the loss instead of into the reward."""
    freezing_actor_steps: int = -1
    """The critic learns alone up to and including this step."""
    dynamic_filtering: bool = False
    """Replace prompts whose responses' mean score is not in the range below, until the step is full or the data end."""
    dynamic_filtering_reward_range: tuple[float, float] = (0.0, 1.0)
    """Which prompts stay: their responses' mean score lies between the two, the bounds excluded."""
    enable_ema: bool = False
    """Save a moving average of the policy's weights instead of the weights. Rollouts and scores are of the weights
    themselves. It is kept in host memory, and brought up to date after every optimizer step."""
    ema_beta: float = 0.992
    """How much of the average stays at each optimizer step."""

    # --- evaluation
    eval_dataset: str | None = None
    """Held-out prompts: as prompt_data; `task:<name>` gives a task's held-out items."""
    eval_scorer: str | None = None
    """Scores held-out responses in place of the reward that is trained on: a built-in scorer, a Python file or servers'
    URLs. Their mean under that reward is logged beside it, as eval/SOURCE_reward. Default: that reward scores them."""
    eval_split: str | None = None
    """Which split of it. Default: train, as in OpenRLHF; of a task: heldout."""
    max_eval_samples: int = 2048
    """How many of them."""
    eval_steps: int = -1
    """Evaluate every so many steps; -1 only at the start and at the end."""
    eval_temperature: float = 0.6
    """Of the responses behind pass1 and passN. The run's score is taken at temperature 1 and greedy besides."""
    eval_n_samples_per_prompt: int = 4
    """N: responses per held-out prompt."""
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
    """Machines that score responses."""
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

    # --- checkpoints
    save_steps: int = 10
    """A checkpoint every so many steps; -1 only of the best policy and when the training ends or is stopped."""
    ckpt_path: str | None = None
    """Folder of the checkpoints. Default: run_dir/checkpoints."""
    max_ckpt_num: int = 3
    """How many checkpoints are kept, the newest ones; the best one is kept beside."""
    max_ckpt_mem: float | None = None
    """GB that the checkpoints may take together; the oldest go first, the latest and the best never. Default: any."""

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
        super().__post_init__()
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}; set it to at least 1")
        self._check_sources()
        self._check_batches()
        self._check_rewards()
        self._check_advantages()
        self._check_loss()
        # The checks of the groups and the engines, before any engine starts.
        try:
            shared = shared_options(self)
            shared.train_engine(1)
            shared.critic_engine(1)
        except ValueError as error:
            raise ConfigError(renamed(str(error))) from error

    def _check_sources(self) -> None:
        template = self.input_template
        if template is not None and self.apply_chat_template:
            raise ConfigError("apply_chat_template and input_template exclude each other; unset one of them")
        if template is not None and template.count("{}") != 1:
            raise ConfigError(f"input_template={template!r} must hold {{}} once, where the prompt goes")
        if self.colocate_all_models and (self.colocate_actor_ref or self.colocate_critic_reward):
            raise ConfigError("colocate_all_models includes the other two; set it alone")
        if self.colocate_actor_ref and not self.needs_reference:
            raise ConfigError("colocate_actor_ref=true, but with init_kl_coef=0 there is no reference; unset one")
        if self.colocate_critic_reward and not self.reward_pretrain:
            raise ConfigError("colocate_critic_reward=true, but only a reward_pretrain takes a device; unset it")
        if self.eval_dataset is None and (self.eval_scorer or self.eval_split):
            raise ConfigError("eval_scorer or eval_split without eval_dataset; set that too")
        if self.eval_scorer is not None and self.agent_func_path is not None:
            raise ConfigError(f"eval_scorer={self.eval_scorer}, but an agent's environment scores it all; unset one")

    def _check_batches(self) -> None:
        size, samples = self.train_batch_size, self.rollout_batch_size * self.n_samples_per_prompt
        if samples % size:
            product = f"{self.rollout_batch_size} x {self.n_samples_per_prompt} = {samples}"
            raise ConfigError(
                f"train_batch_size={size} does not divide a step's {product} responses; set one that does"
            )
        for role, count in self.ranks.items():
            if size < count:
                fewer = f"train_batch_size={size} leaves some of the {count} {role} ranks without a response"
                raise ConfigError(f"{fewer}; raise it, or lower {role}_num_gpus_per_node")
        low, high = self.dynamic_filtering_reward_range
        if self.dynamic_filtering and self.n_samples_per_prompt < 2:
            few = f"n_samples_per_prompt={self.n_samples_per_prompt}"
            raise ConfigError(f"dynamic_filtering needs responses that differ, but {few}; set it to 2 or more")
        if self.dynamic_filtering and not low < high:
            raise ConfigError(f"dynamic_filtering_reward_range={low} {high}; set the lower bound first")
        if self.dynamic_filtering and self.partial_rollout:
            raise ConfigError("dynamic_filtering replaces prompts that partial_rollout would carry on; unset one")

    def _check_rewards(self) -> None:
        names = ("reward_pretrain", "remote_rm_url", "scorer", "agent_func_path")
        shown = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        if sum(getattr(self, name) is not None for name in names) != 1:
            raise ConfigError(f"{shown}: set exactly one of the four, the others to null")
        models, weights = self.reward_models, self.reward_weights
        if weights is not None and len(weights) != len(models):
            raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(models)} reward models")
        if self.normalize_reward and not models:
            raise ConfigError("normalize_reward is for a reward_pretrain, by its mean and std; leave it out here")
        low, high = self.reward_clip_range
        if not low < high:
            raise ConfigError(f"reward_clip_range={low} {high}; set the lower bound first")
        buffer, longest = self.overlong_buffer_len, self.generate_max_len
        if buffer is not None and not 0 < buffer <= longest:
            raise ConfigError(f"overlong_buffer_len={buffer}; set 1 to generate_max_len={longest}")
        if buffer is not None and self.agent_func_path:
            raise ConfigError("overlong_buffer_len is about one response, not an episode of agent_func_path; unset one")
        if self.overlong_penalty_factor < 0:
            raise ConfigError(f"overlong_penalty_factor={self.overlong_penalty_factor}; set it to 0 or more")
        if self.stop_properly_penalty_coef is not None and self.stop_properly_penalty_coef > 1:
            raise ConfigError(f"stop_properly_penalty_coef={self.stop_properly_penalty_coef}; set it to at most 1")

    def _check_advantages(self) -> None:
        estimator, samples = self.advantage_estimator, self.n_samples_per_prompt
        shown = f"advantage_estimator={estimator}"
        if estimator in GROUPED and samples < 2:
            few = f"n_samples_per_prompt={samples}"
            raise ConfigError(f"{shown} compares the responses to one prompt, but {few}; set it to 2 or more")
        if estimator in GROUPED and self.gamma != 1.0:
            raise ConfigError(f"{shown} has no discount, but gamma={self.gamma}; leave it out")
        if estimator in GROUPED and estimator != "reinforce_baseline" and self.no_advantage_std_norm:
            raise ConfigError(f"{shown} does not whiten; leave no_advantage_std_norm out")
        if self.use_kl_loss and not self.needs_reference:
            raise ConfigError("use_kl_loss=true, but init_kl_coef=0; set a weight, or leave use_kl_loss out")
        has_space = self.kl_horizon > self.rollout_batch_size * samples / 5
        if self.kl_target is not None and not (self.kl_target > 0 and has_space and self.needs_reference):
            shown = f"kl_target={self.kl_target}, kl_horizon={self.kl_horizon}, init_kl_coef={self.init_kl_coef}"
            raise ConfigError(f"{shown}; set all above 0, the horizon to more than a fifth of a step's responses")

    def _check_loss(self) -> None:
        if self.entropy_loss_coef is not None and self.entropy_loss_coef < 0:
            raise ConfigError(f"entropy_loss_coef={self.entropy_loss_coef}; set it to 0 or more")
        lowest = float("inf") if self.policy_loss_type in NOT_OF_RATIOS else 1
        for low, high in ((self.eps_clip, self.eps_clip), self.eps_clip_low_high or (0.0, 0.0)):
            if not 0 <= low <= lowest or high < 0:
                raise ConfigError(f"the ratio cannot be clipped to 1 - {low} and 1 + {high}; see eps_clip")
        if self.dual_clip is not None and (self.dual_clip <= 1 or self.policy_loss_type != "ppo"):
            raise ConfigError(f"dual_clip={self.dual_clip}; set it above 1, with policy_loss_type=ppo")
        kind = self.vllm_is_correction_type
        if self.use_icepop and kind not in (None, "icepop"):
            raise ConfigError(f"use_icepop=true and vllm_is_correction_type={kind}; unset one")

    def check_given(self, given: Collection[str]) -> None:
        """Refuse options that a user has named and that have no effect beside the others.

        Raises:
            ConfigError: a critic's option without a critic.
        """
        idle = ", ".join(f"{name}={getattr(self, name)}" for name in CRITICS_OWN if name in given)
        if idle and not self.needs_critic:
            without = f"advantage_estimator={self.advantage_estimator} trains no critic"
            raise ConfigError(f"{without}, so {idle} has no effect; leave it out, or set advantage_estimator=gae")

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
        return max(getattr(self, name) for name in NODES)

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL to measure."""
        return self.init_kl_coef != 0

    @property
    def needs_critic(self) -> bool:
        """Whether values are learnt."""
        return self.advantage_estimator == "gae"

    @property
    def reward_models(self) -> list[str]:
        """The reward models' folders or names; empty where code or a server scores."""
        return [name.strip() for name in (self.reward_pretrain or "").split(",") if name.strip()]

    @property
    def critic_start(self) -> str:
        """What the critic is loaded from."""
        return self.critic_pretrain or next(iter(self.reward_models), self.pretrain)

    @property
    def reward_code(self) -> str | None:
        """The scorer's name, the reward file or the servers' URLs; None where reward models score."""
        return self.scorer or self.remote_rm_url

    @property
    def aggregation(self) -> Aggregation:
        """How tokens are weighed in the policy's loss."""
        if self.advantage_estimator == "dr_grpo":
            return self.loss_agg_mode or "seq-mean-token-sum-norm"
        return self.loss_agg_mode or ("seq-mean-token-mean" if self.policy_loss_type in BY_RESPONSE else "token-mean")

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
        idle: list[tuple[bool, str, tuple[str, ...]]] = [
            (self.use_dynamic_batch, "use_dynamic_batch cuts by tokens", MICRO_BATCHES),
            (not self.use_dynamic_batch, "use_dynamic_batch is off", TOKEN_BUDGETS),
            (not self.needs_reference, "init_kl_coef=0", ("ref_num_nodes", "ref_num_gpus_per_node")),
            (self.eval_dataset is None, "there is no eval_dataset", ("eval_temperature", "max_eval_samples")),
            (not runs_code, "no reward code is run", ("reward_workers", "reward_timeout")),
            (not asks_server, "no server is asked", ("remote_rm_timeout", "remote_rm_batch_size")),
            (not self.reward_models, "there is no reward_pretrain", ("reward_weights",)),
            (self.overlong_buffer_len is None, "overlong_buffer_len is not set", ("overlong_penalty_factor",)),
            (self.eps_clip_low_high is not None, "eps_clip_low_high is set", ("eps_clip",)),
            (self.policy_loss_type in UNCLIPPED, f"{self.policy_loss_type} clips no ratio", CLIPS),
            (not self.enable_vllm_is_correction, "enable_vllm_is_correction is off", CORRECTIONS_OWN),
            (self.old_policy != "logprob", "gspo corrects its ratio itself", CORRECTIONS_OWN),
            (self.kl_target is None, "there is no kl_target", ("kl_horizon",)),
            (not self.dynamic_filtering, "dynamic_filtering is off", ("dynamic_filtering_reward_range",)),
            (not self.enable_ema, "enable_ema is off", ("ema_beta",)),
            (self.use_wandb is None, "use_wandb is off", WANDBS_OWN),
        ]
        found += without_effect([(why, name, because) for why, because, names in idle for name in names], given)
        own = {there for there, here in flags.RENAMED.items() if here in given}
        return found + [renamed(note) for note in shared_options(self).notes(own)]
