"""Options of this recipe, besides the groups that all recipes share. `--help all` describes them.

verl.yaml and adapter.py translate verl's keys to these options.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from agents.loading import check_agent
from components.generate.config import RolloutConfig
from components.generate.paged_config import PagedRolloutConfig
from components.ranges import Count, Positive, Range
from components.registry import load
from components.train.config import FrozenConfig, PassLimits, TrainConfig
from training.options.data_options import DataOptions
from training.options.evaluation_options import EvaluationOptions
from training.options.ppo_options import BY_RESPONSE, Aggregation, KLEstimator, PPOOptions, PPORunOptions
from training.options.reward_options import RewardOptions
from training.options.rl_options import PolicyTrainOptions
from training.options.rollout_options import RolloutOptions
from training.options.schema import active_when, column_names, errors_of, limit_note

from .adapter import VERL
from .agent_keys import LOOP_AGENT, SINGLE_TURN, TOOL_AGENT, TOOLS
from .resource_pool import PoolOptions

Compared = Literal["grpo", "grpo_passk", "reinforce_plus_plus_baseline", "rloo", "opo", "gpg", "gdpo"]
"""Estimators that compare the responses to one prompt with each other."""
Estimator = Literal[Compared, "gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "distillation"]
ROW_FORMAT = ("row format", "verl")
"""Registry key of the plug-in that reads the rows of files."""
CLASS_ROWS = ("row format", "verl class")
"""Registry key of the plug-in that reads the rows of a user's Dataset class."""
LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "max"}
"""Prefix of a rule of `rejection` -> level at which it is evaluated."""


@dataclass(kw_only=True)
class AlgorithmOptions(PPOOptions):
    """Advantage estimator, policy loss, KL penalty and corrections; docs/algorithms.md has the formulas."""

    estimator: Estimator = "gae"
    """Advantage estimator. gae uses a critic. Without a critic: reinforce_plus_plus and remax; grpo, grpo_passk,
    reinforce_plus_plus_baseline, rloo, opo, gpg and gdpo, which compare the responses to a prompt; and
    optimal_token_baseline, which compares them token by token and needs a second pass for the old log-probabilities.
    distillation uses no reward: the advantage of a token is the log-probability of the reference (reference_path, the
    teacher) minus the policy's."""
    gamma: float = active_when(1.0, estimator=("gae", "reinforce_plus_plus"))
    """Discount per action token."""
    lam: float = active_when(1.0, estimator=("gae",))
    """GAE's lambda."""
    std_norm: bool = active_when(True, estimator=("grpo", "grpo_passk"))
    """Divide the advantages of a prompt's responses by their standard deviation. Dr. GRPO sets it to false."""
    gpg_scale: float = active_when(1.0, estimator=("gpg",))
    """Divisor of the advantages of gpg."""
    gdpo_rewards: list[str] = field(default_factory=list)
    """gdpo: names of numbers that the reward function returns. Each is normalised separately."""
    gdpo_weights: list[float] | None = None
    """gdpo: weights of gdpo_rewards. Default: 1 each."""
    resample: Literal["pow", "max_min", "max_random"] | None = active_when(None, estimator=("gae",))
    """Resampling of the responses by reward R, with replacement (PF-PPO). The number of responses stays the same. pow
    samples by abs(R)^resample_power, max_min the best and the worst ones, max_random the best ones four times as often
    as others. Default: no resampling."""
    resample_power: float = active_when(2.0, resample=("pow",))
    """Exponent of resample=pow."""
    dual_clip: Annotated[float, Range(above=1)] | None = active_when(3.0, policy_loss=("ppo", "dppo_tv", "dppo_kl"))
    kl_cov_coef: float = active_when(0.1, policy_loss=("kl_cov",))
    loss_aggregation: Aggregation = "token-mean"
    """Aggregation of token losses. token-mean: mean over all tokens. token-sum: sum over all tokens.
    seq-mean-token-mean: mean over responses of their means. seq-mean-token-sum: mean over responses of their sums;
    with -norm the sums are divided by loss_length."""
    policy_aggregation: Aggregation | None = None
    """Aggregation of the policy loss only. Default: loss_aggregation, which always applies to entropy and KL. verl's
    gspo, sapo and geo_mean always use seq-mean-token-mean."""
    loss_length: int | None = None
    """Divisor of seq-mean-token-sum-norm, in tokens. Default: rollout.max_new_tokens."""
    kl_target: float | None = active_when(None, kl_in_reward=True)
    kl_loss_coef: float = active_when(0.0, kl_in_reward=True)
    """Coefficient of a KL in the loss, in addition to the KL in the reward."""
    kl_loss_estimator: KLEstimator = active_when("k3", kl_loss_coef=True)
    """KL estimator of kl_loss_coef."""
    reference_path: str = ""
    """Path of the reference model of the KL. Default: the initial policy."""
    reference_sync_steps: Count | None = None
    """Interval, in training steps, at which the reference is replaced by the policy. Default: the reference stays the
    same."""
    correction_range: tuple[float, float] = (0.0, 2.0)
    """Minimum and maximum weight of `correction`."""
    correction_level: Literal["token", "sequence", "geometric"] = active_when("token", correction=("tis", "icepop"))
    """Probability from which the weight of a token is computed: that of the token, of its sequence, or the geometric
    mean over its sequence."""
    correction_normalize: bool = active_when(False, correction=("tis", "icepop"))
    """Divide the weights by their mean over the step's tokens, or over its sequences if weights are per sequence."""
    rejection: str | None = None
    """Exclude tokens or responses whose probabilities differ too much between policy and engine. Rules are token_,
    seq_sum_ or seq_mean_ followed by k1, k2 or k3, or seq_max_ followed by k2 or k3. Separate several with commas.
    Default: nothing is excluded."""
    rejection_threshold: str | None = active_when(None, rejection=True)
    """Bounds of `rejection`: one for all rules, or one per rule, separated by commas. k1: range of the engine's
    probability divided by the policy's, as `low_high`, or as `high` with low = 1 / high. k2 and k3: maximum estimate in
    nats."""
    estimate_rejected: bool = active_when(False, rejection=True)
    """Exclude rejected tokens from the loss only. Otherwise their rewards are also excluded from returns and values,
    including the reward of a response whose last token is rejected."""
    bypass: bool = False
    """Use the engine's log-probabilities as those of the policy before the step, and skip the pass that computes them.
    A rejection (and with policy_loss=reinforce a correction) then compares engine and policy in every training pass."""
    dynamic_sampling: bool = False
    """Dynamic sampling (DAPO): replace prompts whose responses all have the same score, until the step is full or the
    data ends."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        if self.estimator == "gdpo" and len(self.gdpo_weights or self.gdpo_rewards) != max(len(self.gdpo_rewards), 1):
            yield (
                "algorithm.estimator=gdpo: name numbers that the reward function returns in algorithm.gdpo_rewards, "
                "and as many in gdpo_weights, or none"
            )
        yield from errors_of("", lambda: self.rejections)

    @property
    def rejections(self) -> list[tuple[Any, Any, float | None, float]]:
        """(level, estimator, low, high) of each rule. For k1 the bounds are on the policy's probability divided by the
        engine's.
        """
        rules = [rule.strip() for rule in (self.rejection or "").split(",") if rule.strip()]
        bounds = [text.strip() for text in str(self.rejection_threshold or "").split(",") if text.strip()]
        if rules and len(bounds) not in (1, len(rules)):
            raise ValueError(
                f"algorithm.rejection_threshold={self.rejection_threshold}; set one bound, or one for each of "
                f"algorithm.rejection={self.rejection}"
            )
        return [_rule(rule, bounds[i % len(bounds)]) for i, rule in enumerate(rules)]


def _rule(rule: str, bound: str) -> tuple[Any, Any, float | None, float]:
    level, _, estimator = rule.rpartition("_")
    if level not in LEVELS or estimator not in ("k1", "k2", "k3") or rule == "seq_max_k1":
        raise ValueError(
            f"algorithm.rejection={rule}; use token_, seq_sum_ or seq_mean_ with k1, k2 or k3 behind it, or seq_max_ "
            "with k2 or k3"
        )
    try:
        low, high = [float(part) for part in (bound if "_" in bound else f"nan_{bound}").split("_")]
    except ValueError:
        low = high = math.nan
    if not high > 0 or low < 0 or low > high:
        raise ValueError(f"algorithm.rejection_threshold={bound}; set a number above 0, or low_high, as 0.5_2.0")
    if estimator != "k1":
        return LEVELS[level], estimator, None, high
    if math.isnan(low):
        low = 1 / high
    # The bounds are inverted, as the option bounds the inverse ratio.
    return LEVELS[level], estimator, 1 / high, 1 / low if low else math.inf


def _with_raw_prompt(row: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(row["input"], list):
        return row
    return {**row, "extra_info": {**(row.get("extra_info") or {}), "raw_prompt": row["input"]}}


@dataclass(frozen=True, kw_only=True)
class LearnerOptions(PolicyTrainOptions):
    """Training of a model on the responses of a step."""

    engine: str = "fsdp"
    zero_stage: int = 3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    weight_decay_all: bool = True
    lr_warmup_from_zero: bool = True
    gradient_checkpointing: bool = True
    lr_warmup_steps: int = 0
    """Number of training steps in which the learning rate rises from 0. Replaces lr_warmup_ratio. All optimizer steps
    of a training step use the same learning rate."""
    shuffle: bool = False
    """Shuffle the responses in each epoch."""


@dataclass(frozen=True, kw_only=True)
class CriticOptions(LearnerOptions):
    """The value function and its training."""

    GROUP: ClassVar[str] = "critic"

    enabled: bool | None = None
    """Train a critic. Default: true if algorithm.estimator=gae."""
    path: str = ""
    """Initial model of the critic. A model without a value head gets a new one. Default: the policy."""
    learning_rate: float = 1e-5
    max_tokens: int = 32768
    mini_batch_size: Count | None = None
    """Number of responses per optimizer step, over all ranks. Default: that of the policy."""
    value_clip: Positive = 0.5
    """Maximum change of a value per step."""
    warmup_steps: int = 0
    """Number of initial steps in which only the critic is trained."""
    loss_aggregation: Aggregation | None = None
    """Aggregation of the value loss. Default: that of the policy loss."""


@dataclass(kw_only=True)
class RowOptions(DataOptions):
    """The prompts, in verl's rows."""

    path: str = ""
    """Parquet, json or jsonl files with verl's rows, or `task:<name>` for a generated task. Separate several with
    commas."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text, or a list of chat messages, which are rendered with the chat template."""
    source_key: str = "data_source"
    """Column of the data source of a row, which selects its reward function."""
    max_prompt_tokens: Count = 512
    epochs: Count = 30
    overlong: Literal["leave_out", "error", "left", "right", "middle"] = "error"
    class_path: str | None = None
    """Python file with your own Dataset class, or `pkg://` and a module. The class is created with the files of `path`,
    the tokenizer and the keys of `data`, and provides the rows. Default: rows are read from the files."""
    class_name: str = active_when("", class_path=True)
    """Name of the class in class_path."""
    class_arguments: dict[str, Any] = field(default_factory=dict)
    """Additional keys of the config that the class receives."""

    @property
    def used_columns(self) -> list[str]:
        """See `DataOptions.used_columns`."""
        return [self.prompt_key, self.source_key, "reward_model"]

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        if self.path:
            yield from errors_of("", load, *ROW_FORMAT)
        idle = ("probs", "split", "label_key", "apply_chat_template", "input_template")
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in idle and value != option.default:
                yield f"data.{option.name}={value}: the fields of verl's rows define that; leave it out"
        if self.class_path and not self.class_name:
            yield f"data.class_path={self.class_path} without data.class_name; set that too"

    def class_config(self) -> dict[str, Any]:
        """Return the config that a Dataset class receives, in verl's keys."""
        return {
            "prompt_key": self.prompt_key,
            "reward_fn_key": self.source_key,
            "max_prompt_length": self.max_prompt_tokens,
            "truncation": {"leave_out": "error"}.get(self.overlong, self.overlong),
            "filter_overlong_prompts": self.overlong == "leave_out",
            "shuffle": self.shuffle,
            "custom_cls": {"path": self.class_path, "name": self.class_name},
            **self.class_arguments,
        }


@dataclass(kw_only=True)
class FunctionOptions(RewardOptions):
    """Reward of a response: the score of a function, of a reward model, or of both."""

    source: str | None = None
    """Python file with a function `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, which
    returns a number, or a mapping with `score` and other numbers, which are logged. Default: the built-in function of
    the row's data source."""
    function: str = "compute_score"
    """Name of the function in `source`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Additional arguments of the function."""
    whole_batches: bool = active_when(False, source=True)
    """Call the function once per batch, with lists of all responses."""
    num_examine: Annotated[int, Range(least=0)] = 0
    """Number of scored responses of each data source that are printed in each training step and evaluation."""
    model_path: str = ""
    """Path of a reward model: a sequence classifier with one label and the policy's vocabulary."""
    model_max_tokens: int = active_when(32768, model_path=True)
    """Maximum number of tokens per forward pass of the reward model, including padding."""
    model_micro_batch_size: int | None = active_when(None, model_path=True)
    """Maximum number of responses per forward pass of the reward model. Default: limited by model_max_tokens only."""
    function_weight: float = active_when(0.0, model_path=True)
    """Weight of the function's score, which is added to the reward model's. 0 uses the reward model only."""


@dataclass(kw_only=True)
class VerlPPOConfig(PPORunOptions):
    """PPO, GRPO and related algorithms, as in verl."""

    ADAPTER: ClassVar = VERL
    APART: ClassVar[str] = "placement.colocate=false"
    HAS_ENGINES_APART: ClassVar[bool] = False
    FILTER_OPTION: ClassVar[str] = "algorithm.dynamic_sampling"

    prompts_per_step: Count = 1024
    samples_per_prompt: Count = 1
    evaluate_only: bool = False
    """Evaluate the policy without training."""
    data: RowOptions = field(default_factory=RowOptions)  # pyright: ignore[reportIncompatibleVariableOverride]
    reward: FunctionOptions = field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default_factory=FunctionOptions
    )
    rollout: RolloutOptions = field(default_factory=lambda: RolloutOptions(max_new_tokens=512, max_num_seqs=256))
    algorithm: AlgorithmOptions = field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default_factory=AlgorithmOptions
    )
    train: LearnerOptions = field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default_factory=LearnerOptions
    )
    critic: CriticOptions = field(default_factory=CriticOptions)
    evaluation: EvaluationOptions = field(
        default_factory=lambda: EvaluationOptions(temperature=0.0, samples_per_prompt=1, max_samples=None)
    )
    placement: PoolOptions = field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default_factory=PoolOptions
    )

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        options = self.algorithm
        size = self.step_size
        if self.needs_critic:
            yield from self.parallel.combination_faults(self.critic)
        if self.critic.mini_batch_size and self.step_size % self.critic.mini_batch_size:
            yield f"critic.mini_batch_size={self.critic.mini_batch_size} does not divide a step's {size}; set a divisor"
        if self.samples_per_prompt < 2 and (options.estimator in ("grpo_passk", "gdpo") or options.dynamic_sampling):
            yield (
                f"samples_per_prompt={self.samples_per_prompt}, but algorithm.estimator={options.estimator} (or "
                "algorithm.dynamic_sampling) compares the responses to one prompt; set 2 or more"
            )
        if options.estimator == "optimal_token_baseline" and options.bypass:
            yield (
                "algorithm.estimator=optimal_token_baseline reads the policy's whole distribution before the step, "
                "which algorithm.bypass does not compute; unset one of them"
            )
        if options.reference_sync_steps and self.is_own_reference:
            yield (
                "algorithm.reference_sync_steps moves a reference model, and with train.lora_rank it is the policy "
                "without its adapters; unset one of them"
            )
        if options.estimator == "distillation" and not options.reference_path:
            yield "algorithm.estimator=distillation needs a teacher; set algorithm.reference_path to its model"
        if options.estimator == "gae" and not self.needs_critic:
            yield "algorithm.estimator=gae needs the critic, but critic.enabled=false; leave that out"
        if self.asynchronous.partial_rollout and (options.dynamic_sampling or options.estimator == "remax"):
            yield (
                "asynchronous.partial_rollout carries prompts to the next step, which algorithm.dynamic_sampling and "
                "algorithm.estimator=remax do not; unset one of them"
            )
        if self.reward.model_path and self.agent.gives_rewards:
            yield (
                f"agent.func_path={self.agent.func_path} runs episodes, whose environment gives the rewards, and "
                "reward.model_path is set; unset one, or set agent.rewarded_by=reward"
            )
        if self.evaluate_only and self.evaluation.path is None:
            yield "evaluate_only=true without evaluation.path; set that too"
        for role in self.roles:
            count = self.placement.workers(role)
            devices = self.rollout.tensor_parallel if role == "rollout" else 1
            if count > size * devices:
                yield (
                    f"{role} has {count} processes, more than a step's {size} responses; lower "
                    "placement.devices_per_node, or its pool in placement.pools"
                )

    # --- roles

    @property
    def needs_critic(self) -> bool:
        """True if a critic is trained."""
        return self.algorithm.estimator == "gae" if self.critic.enabled is None else self.critic.enabled

    @property
    def roles(self) -> list[str]:
        """Names of the roles of the run."""
        needed = {"critic": self.needs_critic, "ref": self.has_reference_role, "rm": bool(self.reward.model_path)}
        return [role for role in self.placement.mapping if needed.get(role, True)]

    def _faults_of_reward(self) -> Iterator[str]:
        if self.agent.func_path:
            yield from errors_of("", check_agent, self.agent.func_path)
        if self.has_verl_agent:
            from agents.verl_tools import check_interactions, tool_schemas

            yield from errors_of("", tool_schemas, *self.tool_files)
            if path := self.agent.arguments.get("interaction_config_path"):
                yield from errors_of("", check_interactions, path)

    @property
    def is_own_reference(self) -> bool:
        """See `RLOptions.is_own_reference`."""
        return super().is_own_reference and not self.algorithm.reference_path

    @property
    def starts_as_reference(self) -> bool:
        """See `RLOptions.starts_as_reference`."""
        return super().starts_as_reference and self.algorithm.reference_path in ("", self.model.path)

    def syncs_reference(self, step: int) -> bool:
        """Return True if the reference is replaced by the policy after this step."""
        every = self.algorithm.reference_sync_steps
        return self.has_reference_role and every is not None and step % every == 0

    @property
    def needs_reference(self) -> bool:
        """See `RLOptions.needs_reference`."""
        return self.algorithm.estimator == "distillation" or self.algorithm.kl_coef != 0 or self.kl_in_loss[0] != 0

    @property
    def kl_in_loss(self) -> tuple[float, KLEstimator]:
        """Coefficient and estimator of the KL in the loss."""
        kl = self.algorithm
        return (kl.kl_loss_coef, kl.kl_loss_estimator) if kl.kl_in_reward else (kl.kl_coef, kl.kl_estimator)

    @property
    def old_policy(self) -> str:
        """See `PPORunOptions.old_policy`. With `bypass` it is the engine's column."""
        return "rollout_logprob" if self.algorithm.bypass else "logprob"

    @property
    def filter_range(self) -> tuple[None, None] | None:
        """See `RLOptions.filter_range`."""
        return (None, None) if self.algorithm.dynamic_sampling else None

    # --- batches and engines

    def trained(self, part: str) -> LearnerOptions:
        """Return the training options of "actor" or "critic"."""
        if part == "critic":
            return self.critic
        return self.train

    def size_of(self, part: str) -> int:
        """Return the number of responses per optimizer step of "actor" or "critic"."""
        return self.trained(part).mini_batch_size or self.mini_batch_size

    def engine(self, part: str, steps: int) -> TrainConfig:
        """Return the configuration of the training engine of "actor" or "critic", for a run of `steps` steps."""
        learner = self.trained(part)
        # A schedule counts optimizer steps, of which a training step has several.
        per_step = learner.epochs * (self.step_size // self.size_of(part))
        config = replace(self.parallel.of(learner.for_run(steps * per_step, self.seed)), steps_per_rate=per_step)
        warmup = learner.lr_warmup_steps or int(learner.lr_warmup_ratio * steps)
        # Half a step is subtracted, because rounding up could otherwise add a warm-up step.
        share = max(warmup - 0.5, 0.0) / steps
        return replace(config, lr_warmup_ratio=min(share, 1.0))

    def train_engine(self, steps: int) -> TrainConfig:
        """See `RLOptions.train_engine`."""
        return self.engine("actor", steps)

    @property
    def freezes_models(self) -> bool:
        """See `RLOptions.freezes_models`."""
        return super().freezes_models or bool(self.reward.model_path)

    @property
    def reward_engine(self) -> FrozenConfig:
        """Configuration of the reward model's engine."""
        reward = self.reward
        limits = PassLimits(max_tokens=reward.model_max_tokens, max_sequences=reward.model_micro_batch_size or 0)
        return replace(self.frozen_engine, limits=limits)

    def rollout_engine(self) -> RolloutConfig:
        """See `RLOptions.rollout_engine`. In a hybrid worker the engine runs in a separate process."""
        config = super().rollout_engine()
        if not isinstance(config, PagedRolloutConfig):
            return config
        return replace(config, own_process=config.own_process or self.placement.is_hybrid)

    # --- the data

    @property
    def has_verl_agent(self) -> bool:
        """True if episodes use verl's tools or interactions."""
        return self.agent.func_path == str(TOOL_AGENT)

    @property
    def has_verl_loops(self) -> bool:
        """True if a user's agent loops run the episodes."""
        return self.agent.func_path == str(LOOP_AGENT)

    @property
    def tool_files(self) -> tuple[str, str]:
        """Path of the file of verl's tools, and of the Python file with tool functions. "" if there is none."""
        arguments = self.agent.arguments
        return str(arguments.get("tool_config_path", "")), str(arguments.get("function_tool_path", ""))

    def class_config(self) -> dict[str, Any]:
        """Return the complete config that a user's Dataset class receives, in verl's keys."""
        return {
            "max_response_length": self.rollout.max_new_tokens,
            "train_batch_size": self.prompts_per_step,
            "seed": self.seed,
            "tokenizer": self.model.tokenizer_path,
            "apply_chat_template_kwargs": self.model.template_arguments,
            **self.data.class_config(),
        }

    def rows(self, heldout: bool = False, notes: list[str] | None = None) -> list[dict[str, Any]]:
        """Return the rows of the data.

        Args:
            heldout: return the held-out rows instead of the training rows. They are the same for every seed, so that
                runs can be compared. Empty without evaluation.path.
            notes: a note is appended if max_samples leaves rows out.
        """
        options = self.evaluation if heldout else self.data
        files = [str(Path(name.strip()).expanduser()) for name in (options.path or "").split(",") if name]
        own_agent = self.agent.func_path is not None and not self.has_verl_agent
        form = {
            "prompt_key": self.data.prompt_key,
            "source_key": self.data.source_key,
            # Labels are optional with a reward model or an agent's environment, which do not read them, and with a
            # user's function, which may not.
            "needs_truth": not (self.reward.model_path or self.agent.gives_rewards or self.reward.source),
            "agents": None if own_agent else [TOOLS if self.has_verl_agent else SINGLE_TURN],
            "ignored": column_names(self.data.ignored_columns),
            "kept": ("agent_name",) if self.has_verl_loops else (),
            "max_rows": options.max_samples,
            "draw": self.data.shuffle and not heldout,
            "seed": 0 if heldout else self.seed,
            "note": limit_note(notes, f"{options.GROUP}.max_samples"),
        }
        if self.data.class_path and files:
            from training.launch.inputs import data_tokenizer

            source = (self.data.class_path, self.data.class_name)
            rows = load(*CLASS_ROWS)(*source, files, data_tokenizer(self.model), self.class_config(), **form)
        else:
            rows = load(*ROW_FORMAT)(files, heldout=heldout, **form)
        if self.has_verl_loops or self.agent.arguments.get("interaction_config_path"):
            # Loops and interactions need the prompt as messages, not only as rendered text.
            rows = list(map(_with_raw_prompt, rows))
        if self.has_verl_agent and any(self.tool_files):
            from agents.verl_tools import tool_schemas

            if schemas := tool_schemas(*self.tool_files):
                rows = [{**row, "tools": schemas} for row in rows]
        return rows

    def notes(self, set_options: Collection[str]) -> list[str]:
        """Return notes for the user that are printed before the run starts.

        Args:
            set_options: names of the options that the user has set.
        """
        options = self.algorithm
        notes = list[str]()
        aggregation = options.policy_aggregation or options.loss_aggregation
        if options.policy_loss in BY_RESPONSE and aggregation == "token-mean":
            notes.append(
                f"{options.policy_loss} is a mean over responses in its paper; that is algorithm.policy_aggregation="
                "seq-mean-token-mean"
            )
        if options.estimator in get_args(Compared) and self.samples_per_prompt == 1:
            notes.append(f"algorithm.estimator={options.estimator} has nothing to compare: samples_per_prompt is 1")
        for name in ("reference_path", "reference_sync_steps"):
            if getattr(options, name) and not self.needs_reference:
                notes.append(f"no effect of algorithm.{name}: algorithm.kl_coef=0")
        if not self.needs_critic and any(name.startswith("critic.") for name in set_options):
            notes.append("no effect of critic.*: there is no critic")
        if self.rollout.tensor_parallel > 1 and self.placement.shares_devices:
            notes.append("rollout.tensor_parallel: the engines are a role, rollout, on the devices of the ranks")
        return [*notes, *super().notes(set_options)]
