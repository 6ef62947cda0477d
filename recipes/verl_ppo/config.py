"""Every option of the recipe, under verl's keys: `a.b=value`, `--a.b value`, or YAML with `--config FILE`.

The engines' configurations are mapped from these keys below; other names of them, and the keys that are not taken, are
in keys.yaml.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args

from agents.options import AgentOptions
from components.data.text import load_tokenizer
from components.engines.choice import ROLLOUT_ENGINES
from components.engines.config import RolloutConfig, TrainConfig, VLLMRolloutConfig
from training.adapter import ANY, Refused
from training.config import refused_options
from training.options import AsyncOptions, RolloutOptions, RunOptions, new_run_dir
from training.schema import ConfigError, idle_options, where
from training.schema import refuse as refuse_all

from .keys import KEYS, refuse, renamed
from .resource_pool import ResourcePoolManager

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECIPE = Path(__file__).parent.name

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
Compared = Literal["grpo", "grpo_vectorized", "grpo_passk", "reinforce_plus_plus_baseline", "rloo", "rloo_vectorized"]
Estimator = Literal[Compared, "opo", "gpg", "gdpo", "gae", "reinforce_plus_plus", "remax"]
GROUPED = (*get_args(Compared), "opo", "gpg", "gdpo")
"""Estimators that compare the responses to one prompt with each other."""
RatioLoss = Literal["vanilla", "gspo", "cispo", "clip_cov", "geo_mean", "dppo_tv", "dppo_kl"]
PolicyLoss = Literal[RatioLoss, "sapo", "kl_cov", "gpg"]
"""Policy losses: those of RatioLoss have a clip range."""
RATIO = {"policy_loss.loss_mode": get_args(RatioLoss)}
"""Where there is one, as `where` is told."""
CHOICES = {
    "algorithm.adv_estimator": get_args(Estimator),
    "actor_rollout_ref.actor.policy_loss.loss_mode": get_args(PolicyLoss),
    "actor_rollout_ref.actor.loss_agg_mode": get_args(Aggregation),
    "critic.loss_agg_mode": get_args(Aggregation),
    "reward_model.reward_manager": ("naive", "batch", "dapo"),
    "actor_rollout_ref.rollout.name": ROLLOUT_ENGINES,
}
"""What options are set to of which verl has more than there is here; keys.yaml says what to use instead."""
KL_NAMES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Estimators of the KL, each also with a + behind it."""
LOGGERS = ("console", "file", "wandb", "tensorboard")
UNLIMITED = 2**62
"""Tokens of a micro-batch that is cut by sequences, and checkpoints where all are kept."""


@dataclass(kw_only=True)
class DataKeys:
    """The prompts."""

    train_files: Any = None
    """Training prompts in verl's format: a parquet, json or jsonl file, or a list of them; or `task:<name>` for a
    generated task."""
    val_files: Any = None
    """The same of the prompts that validate. Default: no validation."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text, or a list of chat messages, which go through the chat template."""
    reward_fn_key: str = "data_source"
    """Column that says where a row is from, by which its reward function is chosen."""
    train_batch_size: int = 1024
    """Prompts per step."""
    max_prompt_length: int = 512
    """Tokens of a prompt, at most; see `truncation`."""
    max_response_length: int = 512
    """Tokens of a response, at most."""
    train_max_samples: int = -1
    """Use at most this many training prompts; -1: all, of a generated task, which has no end, 10,000."""
    val_max_samples: int = where(-1, val_files=True)
    """The same of those that validate; -1: all, of a generated task 2,048."""
    shuffle: bool = True
    """Go through the prompts in another order in each epoch."""
    seed: int | None = None
    """Of that order. Default: `seed`."""
    filter_overlong_prompts: bool = False
    """Leave prompts out that are longer than max_prompt_length; they are counted."""
    truncation: Literal["error", "left", "right", "middle"] = where("error", filter_overlong_prompts=False)
    """What else becomes of them: an error, or the part that is cut out."""

    def __post_init__(self) -> None:
        self.train_files, self.val_files = as_list(self.train_files), as_list(self.val_files)


@dataclass(kw_only=True)
class OverrideConfig:
    """What a model's config.json says otherwise."""

    attn_implementation: str | None = None
    """Attention kernels: sdpa, eager, flash_attention_2, or whatever transformers takes. Default: its own choice."""


@dataclass(kw_only=True)
class ModelKeys:
    """The policy that the run starts from."""

    path: str = ""
    """A folder or hub name that `from_pretrained` takes, or `warm_start:<task>`, which makes and keeps a tiny
    demonstration model."""
    tokenizer_path: str | None = None
    """The tokenizer's folder or hub name. Default: the model's."""
    custom_chat_template: str | None = None
    """Chat template instead of the tokenizer's own: Jinja, or a file with it. Saved with the trained policy."""
    override_config: OverrideConfig = field(default_factory=OverrideConfig)
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass instead of keeping them."""
    use_remove_padding: bool = True
    """Lay the sequences of a micro-batch end to end instead of padding them. Changes no results but for rounding."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank (peft) instead of the weights. 0: train all."""
    lora_alpha: float = where(16.0, lora_rank=True)
    """Adapters are scaled by lora_alpha / lora_rank."""
    target_modules: Any = where("all-linear", lora_rank=True)  # noqa: RUF009
    """Layers that get an adapter: their names or endings, or all-linear."""


@dataclass(kw_only=True)
class OptimKeys:
    """AdamW and the schedule of its learning rate."""

    lr: float = 1e-6
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """What follows the warm-up."""
    lr_warmup_steps: int | None = -1
    """Steps of the run in which the learning rate rises from 0; -1 or null: lr_warmup_steps_ratio says it."""
    lr_warmup_steps_ratio: float = 0.0
    """Share of the run in which it does."""
    min_lr_ratio: float | None = None
    """Where cosine ends, as a share of the peak. Default: 0."""
    weight_decay: float = 0.01
    """Decoupled decay per optimizer step, in units of the learning rate. Norms and biases are exempt."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""


@dataclass(kw_only=True)
class FSDPKeys:
    """How parameters, gradients and optimizer states are spread over the ranks. fsdp and fsdp2 are the same here,
    torch's fully_shard.
    """

    param_offload: bool = False
    """Keep weights, gradients and optimizer states in host memory."""
    optimizer_offload: bool = False
    """The same: they go together."""
    offload_policy: bool = False
    """The same."""
    reshard_after_forward: bool = True
    """Spread the parameters between forward and backward pass too; else only between optimizer steps."""
    model_dtype: Literal["auto", "fp32", "float32", "bf16", "bfloat16"] = "auto"
    """fp32, or bf16: bfloat16 with float32 master weights. auto: bf16 where there are GPUs."""
    dtype: Literal["auto", "fp32", "float32", "bf16", "bfloat16"] = "auto"
    """Of the matrix products with model_dtype=fp32. auto: bfloat16 where there are GPUs. On a CPU always float32."""

    def __post_init__(self) -> None:
        short = {"float32": "fp32", "bfloat16": "bf16"}
        self.model_dtype = cast(Any, short.get(self.model_dtype, self.model_dtype))
        self.dtype = cast(Any, short.get(self.dtype, self.dtype))
        refuse({"dtype": (self.model_dtype, self.dtype) == ("bf16", "fp32")})

    def choose(self, gpus: int) -> None:
        """Fill in what is left to a machine of so many GPUs."""
        self.model_dtype = ("bf16" if gpus else "fp32") if self.model_dtype == "auto" else self.model_dtype
        if self.model_dtype == "fp32" and not gpus:
            self.dtype = "fp32"
        self.dtype = "bf16" if self.dtype == "auto" else self.dtype

    @property
    def precision(self) -> str:
        """As the engines call the two together."""
        if self.model_dtype == "bf16":
            return "bf16"
        return "bf16_autocast" if (self.model_dtype, self.dtype) == ("fp32", "bf16") else "fp32"


@dataclass(kw_only=True)
class PolicyLossKeys:
    """Which surrogate is minimised; docs/algorithms.md has the formulas."""

    loss_mode: str = "vanilla"
    """vanilla is PPO's; gspo, geo_mean, cispo, sapo, dppo_tv, dppo_kl, clip_cov and kl_cov; gpg has no ratio."""
    clip_cov_ratio: float = 2e-4
    """clip_cov: share of the tokens that it drops."""
    clip_cov_lb: float = 1.0
    """clip_cov: least covariance of these."""
    clip_cov_ub: float = 5.0
    """clip_cov: largest covariance of these."""
    kl_cov_ratio: float = 2e-4
    """kl_cov: share of the tokens that it holds back."""
    ppo_kl_coef: float = 0.1
    """kl_cov: loss per nat that these move."""


@dataclass(kw_only=True)
class ActorKeys:
    """How the policy is trained."""

    strategy: str = "fsdp"
    """fsdp or fsdp2, which are the same here; as critic.strategy."""
    ppo_mini_batch_size: int = 256
    """Prompts of an optimizer step, over all ranks; times rollout.n sequences."""
    ppo_micro_batch_size_per_gpu: int | None = where(None, use_dynamic_bsz=False)
    """Sequences in a forward and backward pass on one rank. Changes memory and speed, never the result."""
    use_dynamic_bsz: bool = False
    """Cut micro-batches by tokens instead."""
    ppo_max_token_len_per_gpu: int = where(16384, use_dynamic_bsz=True)
    """Tokens in such a micro-batch, padding included. A longer sequence stands alone."""
    ppo_epochs: int = 1
    """Passes over each step's sequences."""
    shuffle: bool = False
    """In each pass in another order."""
    data_loader_seed: int = where(42, shuffle=True)
    """Of that order."""
    grad_clip: float = 1.0
    """Gradients are scaled down to this norm."""
    clip_ratio: float = where(0.2, **RATIO)
    """The policy ratio is clipped to 1 +- this."""
    clip_ratio_low: float | None = where(None, **RATIO)
    """To 1 minus this instead."""
    clip_ratio_high: float | None = where(None, **RATIO)
    """To 1 plus this instead."""
    clip_ratio_c: float = 3.0
    """vanilla: a token with a negative advantage costs at most this many times it."""
    tau_pos: float = 1.0
    """sapo: how fast its gate closes for tokens with a positive advantage."""
    tau_neg: float = 1.05
    """sapo: the same for the others."""
    policy_loss: PolicyLossKeys = field(default_factory=PolicyLossKeys)
    loss_agg_mode: Any = "token-mean"
    """How tokens are weighed: each the same (token-mean), each sequence the same (seq-mean-token-mean), or each
    sequence's sum (seq-mean-token-sum, and with -norm divided by loss_scale_factor)."""
    loss_scale_factor: int | None = None
    """See loss_agg_mode. Default: data.max_response_length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy that the loss rewards. It is logged in any case."""
    use_kl_loss: bool = False
    """Add the KL to the starting policy to the loss."""
    kl_loss_coef: float = where(0.001, use_kl_loss=True)
    """Its weight."""
    kl_loss_type: str = where("low_var_kl", use_kl_loss=True)
    """Its estimator: kl (k1), abs, mse (k2) or low_var_kl (k3); with a + its gradient is that of mse, the unbiased
    one."""
    optim: OptimKeys = field(default_factory=OptimKeys)
    fsdp_config: FSDPKeys = field(default_factory=FSDPKeys)

    @property
    def clip_low(self) -> float:
        """How far the ratio may go below 1."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """How far the ratio may go above 1."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


@dataclass(kw_only=True)
class RefKeys:
    """How log-probabilities are computed without gradients: in `ref` of the starting policy, in `rollout` of the
    policy before the step.
    """

    log_prob_micro_batch_size_per_gpu: int | None = None
    """Sequences in a pass on one process. Default: the actor's ppo_micro_batch_size_per_gpu."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Cut by tokens instead. Default: as the actor."""
    log_prob_max_token_len_per_gpu: int | None = None
    """Tokens in such a pass. Default: the actor's ppo_max_token_len_per_gpu."""


@dataclass(kw_only=True)
class ValKeys:
    """How responses are drawn that validate."""

    do_sample: bool = False
    """Sample; else the likeliest tokens are taken."""
    temperature: float = where(0.0, do_sample=True)
    """Of these samples."""
    n: int = 1
    """Responses per prompt."""


@dataclass(kw_only=True)
class RolloutKeys(RefKeys):
    """How responses are drawn."""

    name: str = "auto"
    """Who generates: `vllm`; `hf`, a loop around transformers; or `auto`: vllm where it is installed and faster, on a
    GPU or with a large model."""
    n: int = 1
    """Responses per prompt."""
    temperature: float = 1.0
    """Log-probabilities are taken at the same temperature."""
    top_p: float = 1.0
    """Sample from the likeliest tokens whose probabilities reach this sum. Below 1 the engine's distribution is not the
    one that is trained."""
    top_k: int = -1
    """Sample from so many likeliest tokens; -1: from all."""
    tensor_model_parallel_size: int = 1
    """vllm: devices of one engine. With the hybrid engine each process has an engine of its own device."""
    gpu_memory_utilization: float = 0.5
    """vllm: share of a GPU's memory for weights and cache."""
    cpu_cache_gb: float = 1.0
    """vllm: GiB of an engine's key-value cache on a CPU."""
    max_num_seqs: int = 256
    """Responses that an engine generates at the same time. Changes memory and speed, not tokens."""
    max_model_len: int | None = where(None, name=("auto", "vllm"))
    """vllm: tokens of prompt and response together, at most. Default: data.max_prompt_length +
    data.max_response_length; with an agent agent.max_tokens."""
    enforce_eager: bool = False
    """vllm: no CUDA graphs, which are slower to start and faster to run."""
    enable_prefix_caching: bool = True
    """vllm: read the common beginning of prompts once. Changes speed, not tokens."""
    free_cache_engine: bool = where(True, name=("auto", "vllm"))
    """vllm on GPUs that it shares: give its memory back between generations."""
    verify_weight_sync: bool = False
    """After each step compare a digest of every weight on both sides, and let the policy score greedy responses of the
    engines. Costs about a step's time."""
    val_kwargs: ValKeys = field(default_factory=ValKeys)


@dataclass(kw_only=True)
class ActorRolloutRefKeys:
    """The policy: what trains, what samples, and what it was at the start."""

    hybrid_engine: bool = True
    """One process trains and samples. Otherwise the roles are actor and rollout."""
    model: ModelKeys = field(default_factory=ModelKeys)
    actor: ActorKeys = field(default_factory=ActorKeys)
    ref: RefKeys = field(default_factory=RefKeys)
    rollout: RolloutKeys = field(default_factory=RolloutKeys)


@dataclass(kw_only=True)
class CriticModelKeys:
    """What the critic starts from."""

    path: str | None = None
    """A folder or hub name; without a value head it gets a new one. Default: the policy."""
    enable_gradient_checkpointing: bool = True
    """As of the policy."""
    use_remove_padding: bool = True
    """As of the policy."""
    fsdp_config: FSDPKeys = field(default_factory=FSDPKeys)


@dataclass(kw_only=True)
class CriticKeys:
    """The value function."""

    enable: bool | None = None
    """Whether there is one. Default: with algorithm.adv_estimator=gae."""
    strategy: str = "fsdp"
    """As actor_rollout_ref.actor.strategy."""
    model: CriticModelKeys = field(default_factory=CriticModelKeys)
    optim: OptimKeys = field(default_factory=lambda: OptimKeys(lr=1e-5))
    ppo_mini_batch_size: Any = None
    """Prompts of an optimizer step. Default: the actor's."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Sequences in a forward and backward pass on one rank. Default: the actor's."""
    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens instead. Default: as the actor."""
    ppo_max_token_len_per_gpu: int = 32768
    """Tokens in such a micro-batch."""
    forward_micro_batch_size_per_gpu: int | None = None
    """Sequences in a pass without gradients. Default: ppo_micro_batch_size_per_gpu."""
    forward_max_token_len_per_gpu: int | None = None
    """Tokens in such a pass. Default: ppo_max_token_len_per_gpu."""
    ppo_epochs: Any = None
    """Passes over each step's sequences. Default: the actor's."""
    shuffle: bool | None = None
    """Default: as the actor."""
    data_loader_seed: int = where(42, shuffle=True)
    """Of the order in which it takes them."""
    grad_clip: float = 1.0
    """Gradients are scaled down to this norm."""
    cliprange_value: float = 0.5
    """The critic may move a value by this much per step."""
    loss_agg_mode: Any = None
    """How tokens are weighed. Default: as the actor."""


@dataclass(kw_only=True)
class RewardModelModelKeys:
    """The reward model."""

    path: str | None = None
    """A sequence classifier with one label and the policy's vocabulary: a folder or hub name."""


@dataclass(kw_only=True)
class RewardModelKeys:
    """What a response is worth."""

    enable: bool = False
    """Score responses with a reward model."""
    model: RewardModelModelKeys = field(default_factory=RewardModelModelKeys)
    micro_batch_size_per_gpu: int | None = None
    """Sequences in a pass of the reward model. Default: as the critic's without gradients."""
    use_dynamic_bsz: bool | None = None
    """Cut by tokens instead. Default: as the critic."""
    forward_max_token_len_per_gpu: int | None = None
    """Tokens in such a pass. Default: the critic's."""
    function_weight: float = where(0.0, enable=True)
    """With a reward model: times which the reward function's score is added. 0: the model alone."""
    reward_manager: str = "naive"
    """naive gives the function one response at a time; batch gives it lists; dapo is naive, and answers lose reward
    over the last tokens before data.max_response_length (reward_kwargs.overlong_buffer_cfg)."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Of the manager: `overlong_buffer_cfg: {enable, len, penalty_factor}` and `max_resp_len` of dapo."""
    num_workers: int = 1
    """Processes that run the reward function."""
    timeout_s: float = 60.0
    """Seconds that it may take over one response, before that is counted as failed; with batch over a batch so many
    times its responses."""
    max_failed_share: float = 0.1
    """Share of a batch's responses that may fail (or two, if that is more and not all); above it the run stops."""


@dataclass(kw_only=True)
class CustomRewardFunctionKeys:
    """A reward function of your own, instead of that of the data source."""

    path: str | None = None
    """A Python file."""
    name: str = "compute_score"
    """The function in it: `compute_score(data_source, solution_str, ground_truth, extra_info=None, **reward_kwargs)`,
    which returns a number, or a mapping with `score` and other numbers that are logged."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of it, or of the built-in function."""


@dataclass(kw_only=True)
class KLCtrlKeys:
    """The weight of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: it follows target_kl."""
    kl_coef: float = 0.001
    """At the start."""
    horizon: int = where(10000, type=("adaptive",))
    """adaptive: responses over which it may change by a fifth."""
    target_kl: float = where(0.1, type=("adaptive",))
    """adaptive: mean KL per token, in nats."""


@dataclass(kw_only=True)
class RolloutCorrectionKeys:
    """What is done about the engine that samples having other probabilities than the policy that trains."""

    preset: str | None = None
    """One of verl's presets, disabled, bypass_ppo_clip and decoupled_ with token_is, seq_is, seq_is_rs, geo_rs, k3_rs,
    and the last two also with _token_tis or _seq_tis behind; keys that are set beside it change it."""
    rollout_is: Literal["token", "sequence"] | None = None
    """Weigh each token's loss by the policy's probability over the engine's, of the token or of its sequence."""
    rollout_is_threshold: str | None = where("2.0", rollout_is=True)
    """Largest weight (TIS); or `low_high`: weights outside are 0 (IcePop). null: 2.0."""
    rollout_is_batch_normalize: bool = where(False, rollout_is=True)
    """Divide the weights by their mean over the step."""
    rollout_rs: str | None = None
    """Leave tokens or sequences out whose probabilities differ too much: token_, seq_sum_ or seq_mean_ with k1, k2 or
    k3 behind it; several with commas between."""
    rollout_rs_threshold: str | None = where(None, rollout_rs=True)
    """Bounds of these, one for all or one each: k1 `low_high` of the ratio, or `high`, whose inverse is low; k2 and k3
    the largest estimate, in nats."""
    bypass_mode: bool = False
    """Take the engine's log-probabilities for those of the policy before the step, which are not computed then."""

    def __post_init__(self) -> None:
        chosen = KEYS["presets"].get(self.preset or "disabled")
        refuse({"preset": chosen is None}, name=self.preset, names=", ".join(KEYS["presets"]))
        for name, value in chosen.items():
            if getattr(self, name) == getattr(type(self), name):
                setattr(self, name, value)

    @property
    def weight_bounds(self) -> tuple[float, float, Literal["clamp", "zero"]]:
        """Lowest and highest weight, and what becomes of those outside."""
        found = numbers("rollout_is_threshold", self.rollout_is_threshold or "2.0")
        return (0.0, found[0], "clamp") if len(found) == 1 else (found[0], found[1], "zero")

    @property
    def rejections(self) -> list[tuple[str, Any, float | None, float]]:
        """(of what, estimator, low, high) of each rule: k1 as bounds of the policy's probability over the engine's."""
        rules = [rule.strip() for rule in (self.rollout_rs or "").split(",") if rule.strip()]
        bounds = [text.strip() for text in (self.rollout_rs_threshold or "").split(",") if text.strip()]
        refuse({"bounds": rules and len(bounds) not in (1, len(rules))}, own=self)
        return [_rule(rule, bounds[i % len(bounds)]) for i, rule in enumerate(rules)]


@dataclass(kw_only=True)
class FilterGroupsKeys:
    """Dynamic sampling (DAPO)."""

    enable: bool = False
    """Replace prompts whose responses all have the same score, until the step is full or the data at its end."""


@dataclass(kw_only=True)
class AlgorithmKeys:
    """What makes a response good; docs/algorithms.md has the formulas."""

    adv_estimator: str = "gae"
    """How credit is given: gae with a critic; without one reinforce_plus_plus and remax, and, by comparing the
    responses to a prompt, grpo, grpo_passk, reinforce_plus_plus_baseline, rloo, opo, gpg and gdpo; _vectorized behind
    grpo or rloo changes nothing."""
    gamma: float = where(1.0, adv_estimator=("gae", "reinforce_plus_plus"))
    """Discount per action token, of gae and reinforce_plus_plus."""
    lam: float = where(1.0, adv_estimator=("gae",))
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo: divide by the deviation of a prompt's rewards. Dr. GRPO does not."""
    f_norm: float = 1.0
    """gpg: its advantages are divided by this."""
    gdpo_reward_keys: list[str] = field(default_factory=list)
    """gdpo: numbers that the reward function returns, which are normalised each for itself."""
    gdpo_reward_weights: list[float] | None = None
    """gdpo: their weights. Default: 1 each."""
    use_kl_in_reward: bool = False
    """Take the KL to the starting policy off the reward."""
    kl_penalty: str = where("kl", use_kl_in_reward=True)
    """Its estimator, as actor.kl_loss_type."""
    kl_ctrl: KLCtrlKeys = field(default_factory=KLCtrlKeys, metadata={"use_kl_in_reward": True})
    rollout_correction: RolloutCorrectionKeys = field(default_factory=RolloutCorrectionKeys)
    filter_groups: FilterGroupsKeys = field(default_factory=FilterGroupsKeys)


@dataclass(kw_only=True)
class TrainerKeys:
    """How long, where, and what is kept."""

    total_epochs: int = 30
    """Passes over the prompts."""
    total_training_steps: int | None = None
    """Steps, at most. Default: as many as the epochs have."""
    critic_warmup: int = 0
    """The critic, where there is one, learns alone for so many steps."""
    balance_batch: bool = True
    """Give all ranks about the same work in the passes before the update. Changes no results."""
    nnodes: int = 1
    """Machines. With resource_pool_spec: as many as its longest pool has, unless its pools are on more."""
    n_gpus_per_node: int | None = where(None, resource_pool_spec=False)
    """Processes of the pool on each, without resource_pool_spec. Default: its GPUs; 1 without."""
    resource_pool_spec: dict[str, list[int]] = field(default_factory=dict)
    """Pools: processes on each of its nodes. Default: global_pool with n_gpus_per_node on each of nnodes."""
    role_mapping: dict[str, str] = field(default_factory=dict)
    """Role -> pool, of actor_rollout_ref, actor_rollout, actor, rollout, ref, critic, rm. Default: actor_rollout (or
    actor and rollout without the hybrid engine), and what else is needed, in the first pool."""
    share_processes: bool = False
    """The roles of a pool share processes, rank by rank, not only devices."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """And do nothing else."""
    test_freq: int = -1
    """Validate every so many steps; -1: at the start and the end."""
    save_freq: int = -1
    """A checkpoint every so many steps; -1: of the best policy, and when the training ends or is stopped."""
    max_actor_ckpt_to_keep: Any = 3
    """How many checkpoints are kept, the newest ones, of actor and critic; the best stays beside them. null: all."""
    default_local_dir: str | None = None
    """Folder of the checkpoints. Default: run_dir/checkpoints."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto resumes from the latest checkpoint if there is one; disable begins anew; resume_path resumes from
    resume_from_path. `resume` says the same, and wins."""
    resume_from_path: str | None = None
    """A step's folder, a run's, or one of checkpoints."""
    logger: Any = "console"
    """Who reads along: console and file, which are always there, wandb and tensorboard."""
    project_name: str = "verl_examples"
    """W&B's project."""
    experiment_name: str = "gsm8k"
    """W&B's run."""

    def __post_init__(self) -> None:
        self.logger = as_list(self.logger)
        refuse({"logger": not set(self.logger) <= set(LOGGERS)}, names=self.logger, known=", ".join(LOGGERS))
        self.save_freq = self.save_freq if self.save_freq > 0 else -1
        self.test_freq = self.test_freq if self.test_freq > 0 else -1
        if self.max_actor_ckpt_to_keep is None:
            self.max_actor_ckpt_to_keep = UNLIMITED
        if spec := self.resource_pool_spec.values():
            least, most = max(map(len, spec)), max(sum(map(len, spec)), 1)
            self.nnodes = max(least, 1) if self.nnodes == 1 else self.nnodes
            refuse({"nodes": not least <= self.nnodes <= most}, own=self, least=least, most=most)


@dataclass(kw_only=True)
class VerlPPOConfig(RunOptions):
    """PPO, GRPO and their relatives with verl's keys."""

    ALIASES: ClassVar[Mapping[str, str]] = KEYS["aliases"]
    REFUSED: ClassVar[Mapping[str, Refused]] = {
        key: Refused(entry["why"], dict[str, Any], str(entry.get("harmless", harmless)))
        for section, harmless in (("idle", ANY), ("refused", ""))
        for entry in KEYS[section]
        for key in entry["keys"]
    }

    run_dir: str = field(default_factory=lambda: new_run_dir(RECIPE))
    """Folder of everything that the run writes."""
    data: DataKeys = field(default_factory=DataKeys)
    actor_rollout_ref: ActorRolloutRefKeys = field(default_factory=ActorRolloutRefKeys)
    critic: CriticKeys = field(default_factory=CriticKeys)
    reward_model: RewardModelKeys = field(default_factory=RewardModelKeys)
    custom_reward_function: CustomRewardFunctionKeys = field(default_factory=CustomRewardFunctionKeys)
    algorithm: AlgorithmKeys = field(default_factory=AlgorithmKeys)
    trainer: TrainerKeys = field(default_factory=TrainerKeys)
    agent: AgentOptions = field(default_factory=AgentOptions)
    asynchronous: AsyncOptions = field(default_factory=AsyncOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, source in KEYS["defaults"].items():
            group, _, name = key.rpartition(".")
            if attrgetter(key)(self) is None:
                setattr(attrgetter(group)(self), name, attrgetter(source)(self))
        models: list[Any] = [self.actor_rollout_ref.model, self.critic.model, self.reward_model.model]
        for model in models:
            model.path = model.path and at_home(model.path)
        if self.resume == "auto":
            by_mode = {"auto": "auto", "disable": "none", "resume_path": self.trainer.resume_from_path or ""}
            self.resume = by_mode[self.trainer.resume_mode]
        for key, known in CHOICES.items():
            value = str(attrgetter(key)(self))
            instead = KEYS["elsewhere"].get(value, "")
            refuse({"choice": value not in known}, key=key, value=value, instead=instead, known=", ".join(known))
        try:
            self._check_batches()
            self._check_algorithm()
            self._check_roles()
            for part in ("actor", "critic"):
                self.engine(part, 1)
            apart = "actor_rollout_ref.hybrid_engine=false, and a pool of its own for rollout in trainer.role_mapping"
            refuse_all(self.asynchronous.faults_beside(self.shares_devices, self.backend, self.prompts_per_step, apart))
        except ValueError as error:
            raise ConfigError(renamed(str(error))) from error

    def _check_batches(self) -> None:
        for least, keys in KEYS["at_least"].items():
            for key in keys:
                value: Any = attrgetter(key)(self)
                fits = value is None or (isinstance(value, int | float) and value >= least)
                refuse({"least": not fits}, key=key, value=value, least=least)
        refuse({"no_model": not self.actor_rollout_ref.model.path, "no_data": not self.data.train_files})
        roles = {"actor_rollout_ref.actor": self.policy_role}
        if self.needs_critic:
            roles["critic"] = "critic"
        for key, role in roles.items():
            part = key.rpartition(".")[2]
            own, ranks = self.trained(part), self.pools.workers(role)
            faults = {
                "minibatch": self.prompts_per_step % own.ppo_mini_batch_size,
                "micro_batch": not own.use_dynamic_bsz and own.ppo_micro_batch_size_per_gpu is None,
                "ranks": self.minibatch_sequences(part) < ranks,
            }
            refuse(faults, c=self, key=key, keys=own, ranks=ranks)

    def _check_algorithm(self) -> None:
        own, actor, val = self.algorithm, self.actor_rollout_ref.actor, self.actor_rollout_ref.rollout.val_kwargs
        fix, control, name = own.rollout_correction, own.kl_ctrl, own.adv_estimator
        keys, partial = own.gdpo_reward_keys, self.asynchronous.partial_rollout
        compares = name in GROUPED or own.filter_groups.enable
        unbounded = actor.policy_loss.loss_mode in ("geo_mean", "dppo_tv", "dppo_kl")
        most = self.prompts_per_step * self.samples_per_prompt / 5
        for estimator in (own.kl_penalty, actor.kl_loss_type):
            refuse({"estimator": estimator.removesuffix("+") not in KL_NAMES}, name=estimator)
        faults = {
            "one_response": compares and self.samples_per_prompt < 2,
            "gdpo": name == "gdpo" and (not keys or len(own.gdpo_reward_weights or keys) != len(keys)),
            "gae": name == "gae" and not self.needs_critic,
            "bypass": fix.bypass_mode and (fix.rollout_is or fix.rollout_rs),
            "rejection": fix.rollout_rs and not fix.rollout_rs_threshold,
            "adaptive": control.type == "adaptive" and not (control.target_kl > 0 and control.horizon > most),
            "clip": min(actor.clip_low, actor.clip_high) < 0 or (actor.clip_low > 1 and not unbounded),
            "dual_clip": actor.clip_ratio_c <= 1,
            "value_clip": not self.critic.cliprange_value > 0,
            "greedy": val.n > 1 and self.val_temperature == 0,
            "partial": partial and (own.filter_groups.enable or name == "remax"),
        }
        refuse(faults, c=self)
        _ = fix.weight_bounds, fix.rejections  # refused where they cannot be read

    def _check_roles(self) -> None:
        own, trainer = self.actor_rollout_ref, self.trainer
        engines, devices = self.pools.workers(self.rollout_role), self.rollout.tensor_parallel
        faults = {
            "strategy": not {own.actor.strategy, self.critic.strategy} <= {"fsdp", "fsdp2"},
            "strategies": own.actor.strategy != self.critic.strategy and self.needs_critic,
            "hybrid": not own.hybrid_engine and self.policy_role == self.rollout_role,
            "tensor_parallel": engines % devices or (devices > 1 and self.shares_devices),
            "few_responses": self.sampling_ranks > self.fewest_responses,
            "no_reward_model": self.reward_model.enable and not self.reward_model.model.path,
            "two_rewards": self.reward_model.enable and self.agent.func_path,
            "resume": trainer.resume_mode == "resume_path" and not trainer.resume_from_path,
            "val_only": trainer.val_only and not self.data.val_files,
        }
        refuse(faults, c=self, engines=engines)
        most = self.prompts_per_step * self.samples_per_prompt
        for role in (name for name in self.pools.mapping if name in (self.rollout_role, "ref", "rm")):
            count = self.pools.workers(role) // (devices if role == self.rollout_role else 1)
            refuse({"idle_pool": count > most}, c=self, role=role, count=count, most=most)

    # --- who there is

    @property
    def needs_critic(self) -> bool:
        """Whether values are learnt."""
        return self.algorithm.adv_estimator == "gae" if self.critic.enable is None else self.critic.enable

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL to measure."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def pools(self) -> ResourcePoolManager:
        """Which processes each role has."""
        own = self.trainer
        spec = own.resource_pool_spec or {"global_pool": [own.n_gpus_per_node or 1] * own.nnodes}
        first = next(iter(spec))
        policy = ("actor_rollout",) if self.actor_rollout_ref.hybrid_engine else ("actor", "rollout")
        mapping = dict[str, str](own.role_mapping) or dict.fromkeys(policy, first)
        needed = {"critic": self.needs_critic, "ref": self.needs_reference, "rm": self.reward_model.enable}
        if "actor_rollout_ref" in mapping and "ref" not in mapping:
            needed["ref"] = False
        for role, is_needed in needed.items():
            refuse({"no_pool": is_needed and role not in mapping and own.role_mapping}, role=role, pool=first)
            if is_needed:
                mapping.setdefault(role, first)
            else:
                mapping.pop(role, None)
        return ResourcePoolManager(spec, mapping)

    @property
    def policy_role(self) -> str:
        """The role that trains the policy."""
        return self.pools.holder("actor")

    @property
    def rollout_role(self) -> str:
        """The role that samples."""
        return self.pools.holder("rollout")

    @property
    def shares_devices(self) -> bool:
        """Whether the engines share their devices with other roles."""
        pools = self.pools
        return self.policy_role == self.rollout_role or len(pools.roles_of(pools.mapping[self.rollout_role])) > 1

    # --- how much

    @property
    def prompts_per_step(self) -> int:
        """Prompts of a step."""
        return self.data.train_batch_size

    @property
    def samples_per_prompt(self) -> int:
        """Responses to each."""
        return self.actor_rollout_ref.rollout.n

    @property
    def sampling_ranks(self) -> int:
        """Processes that sample and must all have something to do, as they train too; 1 where they do nothing else."""
        return self.pools.workers(self.policy_role) if self.policy_role == self.rollout_role else 1

    @property
    def fewest_responses(self) -> int:
        """Responses that are asked for at a time in training, at the least."""
        own = self.algorithm
        prompts = 1 if own.filter_groups.enable else self.prompts_per_step
        return prompts * (1 if own.adv_estimator == "remax" else self.samples_per_prompt)

    def trained(self, part: str) -> Any:
        """The keys of "actor" (ActorKeys) or "critic" (CriticKeys)."""
        return self.actor_rollout_ref.actor if part == "actor" else self.critic

    def minibatch_sequences(self, part: str) -> int:
        """Sequences of one optimizer step of "actor" or "critic"."""
        return self.trained(part).ppo_mini_batch_size * self.samples_per_prompt

    def optimizer_steps(self, part: str, steps: int) -> int:
        """Optimizer steps of "actor" or "critic" in so many steps of the run."""
        own = self.trained(part)
        return steps * own.ppo_epochs * (self.prompts_per_step // own.ppo_mini_batch_size)

    def steps(self, num_prompts: int) -> int:
        """Steps of the run; what is left of an epoch's prompts begins the first step of the next."""
        return self.steps_of(num_prompts * self.trainer.total_epochs)

    def steps_of(self, num_prompts: int, done: int = 0) -> int:
        """Steps that so many prompts fill, of all epochs together, where so many steps are done. Filtered prompts leave
        less for the last one, or fewer steps.
        """
        filtered = self.algorithm.filter_groups.enable * (self.prompts_per_step - 1)
        most = self.trainer.total_training_steps
        steps = (num_prompts + filtered) // self.prompts_per_step
        return steps if most is None else min(steps, max(most - done, 0))

    def arithmetic(self, num_prompts: int) -> str:
        """How much of what a run does, in a sentence; refuses what fills no step."""
        own, n, prompts = self.actor_rollout_ref.actor, self.samples_per_prompt, self.prompts_per_step
        steps, total = self.steps(num_prompts), num_prompts * self.trainer.total_epochs
        unused, (tokens, sequences) = max(total - steps * prompts, 0), self._micro_batch("actor")
        micro = f"{sequences} sequences" if sequences else f"{tokens} tokens"
        at_most = "at most " * self.algorithm.filter_groups.enable
        left = f"; the last {unused} of all {total} prompts are not used" if unused else ""
        return (
            f"{at_most}{steps} steps of {prompts} prompts x {n} responses = {prompts * n} sequences; "
            f"in each {self.optimizer_steps('actor', 1)} optimizer steps of {own.ppo_mini_batch_size} prompts = "
            f"{self.minibatch_sequences('actor')} sequences, in micro-batches of at most {micro} on each of "
            f"{self.pools.workers(self.policy_role)} processes{left}"
        )

    # --- the engines

    def _micro_batch(self, part: str) -> tuple[int, int]:
        own = self.trained(part)
        if own.use_dynamic_bsz:
            return own.ppo_max_token_len_per_gpu, 0
        return UNLIMITED, own.ppo_micro_batch_size_per_gpu or self.minibatch_sequences(part)

    def forward_limits(self, part: str) -> tuple[int, int]:
        """Tokens and sequences of a pass without gradients of "actor", "ref", "critic" or "rm"; 0 sequences set no
        limit.
        """
        is_dynamic, tokens, sequences = (attrgetter(key)(self) for key in KEYS["forward"][part])
        return (tokens, 0) if is_dynamic else (UNLIMITED, sequences or 1)

    def engine(self, part: str, steps: int) -> TrainConfig:
        """The training engine of "actor" or "critic", in a run of so many steps."""
        own: Any = self.trained(part)
        shards: FSDPKeys = own.fsdp_config if part == "actor" else self.critic.model.fsdp_config
        total, warmup = self.optimizer_steps(part, steps), own.optim.lr_warmup_steps_ratio
        if own.optim.lr_warmup_steps is not None and own.optim.lr_warmup_steps >= 0:
            # verl counts steps of the run; half a step less, so that no rounding adds one.
            warmed = max(self.optimizer_steps(part, own.optim.lr_warmup_steps) - 0.5, 0)
            warmup = min(warmed / max(total, 1), 1.0)
        tokens, sequences = self._micro_batch(part)
        forward_tokens, forward_sequences = self.forward_limits(part)
        return TrainConfig(
            **self.shared(part),
            engine="fsdp",
            zero_stage=3 if shards.reshard_after_forward else 2,
            precision=shards.precision,
            lr_scheduler="constant" if own.optim.lr_scheduler_type == "constant" else "cosine_with_min_lr",
            lr_warmup_ratio=warmup,
            min_lr_ratio=own.optim.min_lr_ratio or 0.0,
            total_steps=total,
            max_tokens=tokens,
            max_sequences=sequences,
            forward_max_tokens=forward_tokens,
            forward_max_sequences=forward_sequences or UNLIMITED,  # 0 would be: as in training
            lora_target_modules=",".join(as_list(self.actor_rollout_ref.model.target_modules)),
            adam_offload=shards.param_offload or shards.optimizer_offload or shards.offload_policy,
        )

    @property
    def dtype(self) -> str:
        """Of models that are not trained."""
        return "float32" if self.actor_rollout_ref.actor.fsdp_config.precision == "fp32" else "bfloat16"

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The policy's, with the chat template that was given. One that has no token for padding pads with its end
        token.
        """
        own = self.actor_rollout_ref.model
        return load_tokenizer(own.tokenizer_path or own.path, chat_template=own.custom_chat_template, pad_with_end=True)

    def shared(self, group: str) -> dict[str, Any]:
        """Options of a group that recipes share, by their names there, as far as each is a key of verl's."""
        keys = {tuple(option.rpartition(".")[::2]): key for option, key in KEYS["groups"].items()}
        return {name: attrgetter(key)(self) for (owner, name), key in keys.items() if owner == group}

    @property
    def rollout(self) -> RolloutOptions:
        """How responses are sampled, as the group of options that recipes share."""
        own = self.actor_rollout_ref.rollout
        devices = 1 if self.policy_role == self.rollout_role else own.tensor_model_parallel_size
        found = self.shared("rollout")
        found["top_k"] = max(own.top_k, 0)
        found["tensor_parallel"] = devices
        return RolloutOptions(**found)

    @property
    def sleeps(self) -> bool:
        """Whether the engines give their memory back between generations; not between an agent's episodes."""
        own = self.actor_rollout_ref.rollout
        return own.free_cache_engine and own.name == "vllm" and self.shares_devices and not self.agent.func_path

    def rollout_engine(self) -> RolloutConfig:
        """The engine of a process that samples."""
        longest = self.agent.longest_prompt(self.data.max_prompt_length, self.data.max_response_length)
        config = self.rollout.engine_config(self.dtype, longest, self.shares_devices, self.sleeps)
        if not isinstance(config, VLLMRolloutConfig):
            return config
        length = self.actor_rollout_ref.rollout.max_model_len or config.max_model_len
        return replace(config, max_model_len=length, own_process=self.policy_role == self.rollout_role)

    @property
    def val_temperature(self) -> float:
        """Of the responses that validate."""
        own = self.actor_rollout_ref.rollout.val_kwargs
        return own.temperature if own.do_sample else 0.0

    # --- what a user should know

    def notes(self, given: Collection[str]) -> list[str]:
        """What a user who has named the options `given` should know of before the run starts."""
        own, actor = self.actor_rollout_ref, self.actor_rollout_ref.actor
        found, mode = list[str](), actor.policy_loss.loss_mode
        if mode in ("gspo", "sapo", "geo_mean") and actor.loss_agg_mode == "token-mean":
            found.append(f"{mode} is a mean over responses in its paper; that is loss_agg_mode=seq-mean-token-mean")
        if self.policy_role == self.rollout_role and own.rollout.tensor_model_parallel_size > 1:
            found.append("tensor_model_parallel_size: each process of the hybrid engine samples on its own device")
        if self.algorithm.use_kl_in_reward and actor.use_kl_loss:
            found.append("the KL is both taken off the reward and added to the loss")
        idle = [*self._idle_beside(), *idle_options(self)]
        for option in sorted(given):
            reasons = [why for name, why in idle if f"{option}.".startswith(f"{name}.")]
            found += [f"no effect of {option}: {why}" for why in reasons[:1]]
        roles = [role for role in self.trainer.role_mapping if role not in self.pools.mapping]
        found += [f"no effect of {role} in trainer.role_mapping: nothing needs it" for role in roles]
        shared = [name for name, key in KEYS["groups"].items() if key in given]
        notes = [*self.rollout.notes(shared), *self.agent.notes(given, own.rollout.name)]
        fix = self.algorithm.rollout_correction
        corrects = fix.rollout_is is not None or fix.bypass_mode
        notes += self.asynchronous.notes(given, "algorithm.rollout_correction.rollout_is=token", corrects)
        return found + [renamed(note) for note in notes]

    def _idle_beside(self) -> Iterator[tuple[str, str]]:
        """As `idle_options`: options without effect beside those of other groups."""
        actor = self.actor_rollout_ref.actor
        if actor.clip_ratio_low is not None and actor.clip_ratio_high is not None:
            yield "actor_rollout_ref.actor.clip_ratio", "clip_ratio_low and clip_ratio_high are set"
        if not self.needs_critic:
            yield from dict.fromkeys(("critic", "trainer.critic_warmup"), "there is no critic").items()
        if not self.data.val_files:
            names = ("trainer.test_freq", "trainer.val_before_train", "actor_rollout_ref.rollout.val_kwargs")
            yield from dict.fromkeys(names, "there are no data.val_files").items()


def plain_arguments(arguments: Sequence[str]) -> list[str]:
    """Hydra's way of writing as that of `load_config`: without + before a key, and with blanks in mappings.

    Raises:
        ConfigError: something of Hydra's that is not here.
    """
    plain = list[str]()
    for word in arguments:
        hydra = word.startswith(("~", "--config-name", "--config-path", "--config-dir", "hydra."))
        refuse({"hydra": hydra}, word=word)
        key, equals, value = word.lstrip("+").partition("=")
        if len(value) > 1 and value[0] in "'\"" and value.find(value[0], 1) == len(value) - 1:
            value = value[1:-1]  # quotes that the shell has left
        if value.startswith("{") and not {"'", '"'} & set(value):  # Hydra takes {a:1} too
            value = re.sub(r"([{,]\s*\w+):(?=\S)", r"\1: ", value)
        plain.append(f"{key}{equals}{value}")
    return plain


def idle_notes(arguments: Sequence[str]) -> list[str]:
    """What keys of a command line, as `plain_arguments` gives it, and of its `--config FILE` have no effect."""
    named = refused_options(VerlPPOConfig, arguments)
    notes = list[str]()
    for entry in KEYS["idle"]:
        if keys := [key for key in entry["keys"] if key in named]:
            notes.append(f"no effect of {', '.join(keys)}: {entry['why']}")
    return notes


def as_list(value: Any) -> list[str]:
    """One text or a list of them, as verl takes both."""
    if value is None:
        return []
    return [at_home(str(item)) for item in (value if isinstance(value, list) else [value])]


def at_home(path: str) -> str:
    """The path with ~ written out: the shell leaves it in key=~/model."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


def numbers(name: str, text: str) -> list[float]:
    """One number, or two with _ between them, the lower first.

    Raises:
        ConfigError: it is something else.
    """
    try:
        found = [float(part) for part in text.split("_")]
    except ValueError:
        found = []
    refuse({"bound": len(found) not in (1, 2) or not 0 <= found[0] <= found[-1] > 0}, name=name, text=text)
    return found


def _rule(rule: str, bound: str) -> tuple[str, Any, float | None, float]:
    level, _, estimator = rule.rpartition("_")
    known = level in ("token", "seq_sum", "seq_mean") and estimator in ("k1", "k2", "k3")
    refuse({"later": level == "seq_max", "rule": not known}, rule=rule)
    found = numbers("rollout_rs_threshold", bound)
    if estimator != "k1":
        return level, estimator, None, found[-1]
    low = found[0] if len(found) == 2 else 1 / found[0]
    return level, estimator, 1 / found[-1], 1 / low if low else math.inf  # verl bounds the inverse
