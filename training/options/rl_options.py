"""Options shared by reinforcement-learning recipes: groups, checks, and derived sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from agents.options import AgentOptions
from components.generate.config import EVALUATION_STEP, RolloutConfig, SamplingConfig
from components.ranges import Count, NotNegative
from components.registry import find, load, names, require
from components.rewards.base import check_reward
from components.rewards.scorers import default_scorer, scorer_names
from components.train.config import FrozenConfig, TrainConfig
from components.weights.choice import SyncSetting, choose_weight_sync, transport_fault
from training.options.adapter import Adapter
from training.options.async_options import AsyncOptions
from training.options.checkpoint_options import CheckpointOptions
from training.options.data_options import DataOptions
from training.options.evaluation_options import EvaluationOptions
from training.options.log_options import LogOptions
from training.options.model_options import ModelOptions
from training.options.parallel_options import ParallelOptions
from training.options.placement_options import PlacementOptions
from training.options.reward_options import RewardOptions
from training.options.rollout_options import RolloutOptions
from training.options.run_options import RunOptions
from training.options.schema import ConfigError, Options, errors_of, idle_options, refuse, without_effect
from training.options.train_options import LearnerOptions


@dataclass(kw_only=True)
class PolicyOptions(Options, group="algorithm"):
    """Clip range, KL penalty and importance-sampling correction. A recipe adds the options of its algorithm."""

    clip_low: float = 0.2
    """Lower clip range: the importance-sampling ratio is clipped at 1 minus this value."""
    clip_high: NotNegative = 0.2
    """Upper clip range: the importance-sampling ratio is clipped at 1 plus this value. A value above clip_low is DAPO's
    clip-higher."""
    kl_coef: NotNegative = 0.0
    """Coefficient of the KL penalty to the reference model. 0 disables it and starts no reference role."""
    correction: Literal["none", "tis", "icepop"] = "none"
    """Importance-sampling correction of the mismatch between trainer and engine: weight of a token's loss is the
    policy's probability over that of the engine which sampled the token. `tis` truncates weights to correction_range,
    `icepop` sets weights outside of it to 0. `none` applies no weights."""
    correction_range: tuple[float, float] = (0.5, 5.0)
    """Minimum and maximum importance-sampling weight of a token. The share of tokens outside is logged as
    rollout/outside_share; without a correction only if a step has several optimizer steps."""

    @property
    def most_clip_low(self) -> float:
        """Maximum of clip_low: 1, since a ratio is positive."""
        return 1.0

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if not 0 <= self.clip_low <= self.most_clip_low:
            yield f"algorithm.clip_low={self.clip_low}; set it to at least 0, at most {self.most_clip_low:g}"
        if self.correction != "none":
            yield from errors_of("", require, "loss correction", self.correction, "algorithm.correction")
        low, high = self.correction_range
        if not 0 <= low < high:
            yield f"algorithm.correction_range={low} {high}; set two ratios, the lower first"


@dataclass(frozen=True, kw_only=True)
class PolicyTrainOptions(LearnerOptions):
    """Training on the responses of a step: engine, batches, optimizer, schedule, memory."""

    precision: str = "auto"
    """Training precision. `fp32`; `bf16`: bfloat16 parameters with float32 master weights; `bf16_autocast`: float32
    parameters with matrix products in bfloat16; `auto`: bf16 on GPUs, fp32 on CPUs."""
    mini_batch_size: Count | None = None
    """Number of responses per optimizer step, over all ranks. Default: all responses of a training step, which is
    strictly on-policy."""
    epochs: Count = 1
    """Number of passes over the responses of a step."""
    micro_batch_size: Count | None = None
    """Maximum number of responses per rank in one forward and backward pass. By default only max_tokens limits it.
    Affects memory and speed, not results."""
    forward_micro_batch_size: Count | None = None
    """Maximum number of responses per rank in one forward pass without gradients. Default: micro_batch_size."""

    def for_run(self, total_steps: int, seed: int) -> TrainConfig:
        """See `TrainOptions.for_run`."""
        return replace(
            super().for_run(total_steps, seed),
            max_sequences=self.micro_batch_size or 0,
            forward_max_sequences=self.forward_micro_batch_size or 0,
        )


@dataclass(kw_only=True)
class EpisodeOptions(AgentOptions):
    """Options of episodes. Their errors are reported together with those of all other options."""

    def __post_init__(self) -> None:
        refuse(errors_of("", super().__post_init__))


@dataclass(kw_only=True)
class RLOptions(RunOptions):
    """Groups of options of a recipe that trains a policy on its own rollouts."""

    ADAPTER: ClassVar[Adapter] = Adapter.of_names(
        {
            "rollout_engine": "rollout.engine",
            "data.input_key": "data.prompt_key",
            "verify_weight_sync": "rollout.verify_weight_sync",
            "agent_func_path": "agent.func_path",
            "async_train": "asynchronous.enabled",
            "async_queue_size": "asynchronous.queue_size",
            "partial_rollout": "asynchronous.partial_rollout",
        }
    )
    ROLLOUTS: ClassVar[str] = "responses"
    """Noun for rollouts in messages of the recipe."""
    KL_IN_REWARD: ClassVar[bool] = False
    """True if the KL penalty is subtracted from the reward of each token, False if it is a term of the loss."""
    APART: ClassVar[str] = "placement.colocate=false"
    """Option and value that give generation and training separate devices."""
    CORRECT: ClassVar[str] = "algorithm.correction=tis"
    """Option and value that weight older responses by importance sampling."""
    HAS_ENGINES_APART: ClassVar[bool] = True
    """True if rollout engines run in processes of their own."""
    FILTER_OPTION: ClassVar[str] = "algorithm.filter_range"
    """Option that sets `filter_range`."""

    prompts_per_step: Count = 64
    """Number of prompts per training step."""
    samples_per_prompt: Count = 8
    """Number of responses (or episodes) sampled per prompt."""
    max_steps: Count | None = None
    """Maximum number of training steps. By default the number of prompts and data.epochs determine it."""
    sandbox: Literal["isolated", "unsafe"] = "isolated"
    """Isolation of programs written by the policy. `isolated`: Linux namespaces and resource limits. `unsafe`: resource
    limits only, with access to the files and the network of this user, for systems that forbid namespaces."""
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    agent: AgentOptions = field(default_factory=EpisodeOptions)
    asynchronous: AsyncOptions = field(default_factory=AsyncOptions)
    algorithm: Any = field(default_factory=PolicyOptions)
    """PolicyOptions; a recipe names its own subclass."""
    train: PolicyTrainOptions = field(default_factory=PolicyTrainOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    log: LogOptions = field(default_factory=LogOptions)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        if self.checkpoint.export != "last":
            yield from load("export check", self.checkpoint.export, "checkpoint.export")(self)
        for name, value in (("model.path", self.model.path), ("data.path", self.data.path)):
            if not value:
                yield f"{name} is empty; set {name}=..., or run without options for the demonstration"
        yield from self._faults_of_sizes()
        yield from transport_fault(self.placement.nodes)
        yield from self.parallel.combination_faults(self.train)
        if self.asynchronous.ahead or self.asynchronous.in_flight_prompts:
            # The other checks belong to the plug-in, so a missing one is reported alone.
            queue = "rollout queue", "faults", "asynchronous.enabled=true"
            yield from list(errors_of("", require, *queue)) or load(*queue)(self)
        if getattr(self.algorithm, "reference_sync_steps", None):
            yield from errors_of("", require, "reference update", "sync", "algorithm.reference_sync_steps=...")
        # The engine loads the plug-in at the first sleep, which is after the models are loaded.
        if self.placement.learners_sleep:
            yield from errors_of("", require, "sleep", "host copies", "placement.learners_sleep=true")
        if self.rollout.routing_replay != "off":
            yield from load("routing replay check", "options")(self)
        strategy, option = self.rollout_strategy
        if strategy and strategy not in names("rollout strategy"):
            yield f"{option} needs the plug-in {strategy}, which is not in plugins/; unset {option}"
        if check := find("rollout strategy check", strategy):
            yield from check(self)
        # Only then: a run with another engine does not need the plug-in that knows the arguments.
        if self.rollout.vllm:
            yield from self.engine_arguments().faults()
        if self.data.path:
            yield from self._faults_of_reward()

    def _faults_of_reward(self) -> Iterator[str]:
        # As errors of options, so that they are reported together with the others and not one run later.
        yield from errors_of("", self._check_reward)

    def _check_reward(self) -> None:
        if self.agent.func_path:
            load("agents", "check")(self.agent.func_path)
        if self.reward_source is not None:
            check_reward(self.reward_source)
            if self.reward_source not in scorer_names():
                require("reward trial", "rewards", f"reward.source={self.reward_source}")

    def _faults_of_sizes(self) -> Iterator[str]:
        # A smaller last mini-batch would give its responses a higher learning rate than those of the others.
        if self.step_size % self.mini_batch_size:
            yield (
                f"train.mini_batch_size={self.mini_batch_size} does not divide a step's {self.step_size} "
                f"{self.ROLLOUTS} (prompts_per_step={self.prompts_per_step} x samples_per_prompt="
                f"{self.samples_per_prompt}); set a divisor"
            )
        # A rank without a response would leave the others waiting in a collective.
        if self.step_size < (self.placement.actor_ranks or 1):
            yield (
                f"a step has {self.step_size} {self.ROLLOUTS}, fewer than placement.actor_ranks="
                f"{self.placement.actor_ranks}; raise prompts_per_step, or lower placement.actor_ranks"
            )

    @property
    def reward_source(self) -> str | None:
        """Source of the rewards, or None if the agent's environment gives them.

        It is `reward.source`, or else the scorer of the task in `data.path`.

        Raises:
            ConfigError: there is no source, or there are two.
        """
        # Two sources would leave it open which of them the policy is trained on.
        if self.agent.gives_rewards:
            if self.reward.source:
                raise ConfigError(
                    f"reward.source={self.reward.source}, but rewards come from the environment of agent.func_path="
                    f"{self.agent.func_path}; set one of the two, or agent.rewarded_by=reward"
                )
            return None
        source = self.reward.source or default_scorer(self.data.path)
        if source is None:
            raise ConfigError(
                f"data.path={self.data.path} names no task with a reward of its own; set reward.source to a scorer, a "
                ".py file or the URL of a reward server"
            )
        return source

    @property
    def needs_reference(self) -> bool:
        """True if there is a KL penalty to the reference model."""
        return self.algorithm.kl_coef != 0

    @property
    def is_own_reference(self) -> bool:
        """True if the policy without its adapters is the reference, so that no reference role is needed."""
        return self.train.lora_rank > 0

    @property
    def starts_as_reference(self) -> bool:
        """True if training starts from the reference model, so that the initial KL is 0."""
        return not self.train.lora_path

    @property
    def has_reference_role(self) -> bool:
        """True if the reference is a separate model."""
        return self.needs_reference and not self.is_own_reference

    @property
    def freezes_models(self) -> bool:
        """True if there is a model that is evaluated but not trained."""
        return self.has_reference_role

    @property
    def needs_old_logprobs(self) -> bool:
        """True if the policy's log-probabilities before the update are needed.

        With one optimizer step per training step they equal those of the update itself.
        """
        if self.KL_IN_REWARD and self.needs_reference:
            return True
        return self.updates_per_step > 1 or self.algorithm.correction != "none"

    @property
    def filter_range(self) -> tuple[float, float] | tuple[None, None] | None:
        """Range of dynamic sampling, or None if it is disabled.

        Prompts whose mean score is outside of the range are replaced. (None, None) replaces prompts whose scores are
        all equal.
        """
        return getattr(self.algorithm, "filter_range", None)

    @property
    def rollout_strategy(self) -> tuple[str, str]:
        """Name of the plug-in that collects the rollouts of a step, and the option that selects it.

        Both are empty for the default strategy, which takes all rollouts of the next prompts.
        """
        if self.data.curriculum != "none":
            return "curriculum", "data.curriculum"
        # First, because stored rollouts replace every other way to get some.
        if self.rollout.replay_from:
            return "stored_rollouts", "rollout.replay_from"
        if self.asynchronous.partial_rollout:
            return "partial_rollouts", "asynchronous.partial_rollout"
        if self.filter_range is not None:
            return "dynamic_sampling", self.FILTER_OPTION
        return "", ""

    @property
    def step_size(self) -> int:
        """Number of responses per training step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def mini_batch_size(self) -> int:
        """Number of responses per optimizer step."""
        return self.train.mini_batch_size or self.step_size

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer steps per training step, over all epochs."""
        return self.train.epochs * (self.step_size // self.mini_batch_size)

    @property
    def frozen_engine(self) -> FrozenConfig:
        """Configuration of the engine of frozen models: precision and micro-batches of the policy."""
        train = self.train.for_run(1, self.seed)
        return FrozenConfig(
            precision=train.precision,
            limits=train.forward_limits,
            packing=train.packing,
            layout=self.placement.frozen_models,
        )

    @property
    def micro_batch_size(self) -> str:
        """Maximum size of a micro-batch as text, with its unit."""
        tokens = f"{self.train.max_tokens} tokens"
        return f"{self.train.micro_batch_size} {self.ROLLOUTS} or {tokens}" if self.train.micro_batch_size else tokens

    def optimizer_steps(self, count: int) -> int:  # noqa: ARG002 - a recipe whose steps differ in size reads it
        """Return the number of optimizer steps per epoch for `count` responses."""
        return self.step_size // self.mini_batch_size

    def steps(self, num_prompts: int) -> int:
        """Return the number of training steps for a number of prompts.

        With dynamic sampling this is the maximum: filtered prompts shorten the last step, or leave fewer steps.
        """
        # Dynamic sampling may train on an incomplete last step, so a remainder counts as a step.
        remainder = self.prompts_per_step - 1 if self.filter_range else 0
        steps = (num_prompts + remainder) // self.prompts_per_step
        return min(steps, self.max_steps or steps)

    def arithmetic(self, num_prompts: int) -> str:
        """Return one sentence with the number of steps, responses, optimizer steps and micro-batches of the run."""
        total = num_prompts * self.data.epochs
        steps = self.steps(total)
        unused = max(total - steps * self.prompts_per_step, 0)
        at_most = "at most " if self.filter_range else ""
        left_over = f"; the last {unused} prompts do not fill a step and are unused" if unused else ""
        if unused >= self.prompts_per_step and steps == self.max_steps:
            left_over = f"; {unused} of {total} prompts are unused: max_steps={self.max_steps} ends the run before"
        return (
            f"{at_most}{steps} steps of {self.prompts_per_step} prompts x {self.samples_per_prompt} {self.ROLLOUTS} = "
            f"{self.step_size}; in each {self.updates_per_step} optimizer steps of "
            f"{self.mini_batch_size} {self.ROLLOUTS}, in micro-batches of at most "
            f"{self.micro_batch_size}{left_over}"
        )

    def notes(self, set_options: Collection[str]) -> list[str]:
        """Return notes for the user before the run starts.

        Args:
            set_options: names of the options that the user has set.
        """
        idle = [
            (not self.needs_reference, "algorithm.kl_estimator", "algorithm.kl_coef=0"),
            (not self.needs_reference, "placement.references", "algorithm.kl_coef=0"),
            (not self.freezes_models, "placement.frozen_models", "the run has no reference or reward model"),
            (self.is_own_reference, "placement.references", "the policy without its adapters is the reference"),
        ]
        if self.rollout.routing_replay == "policy":
            reason = "each training step has a single optimizer step"
            idle.append((not self.needs_old_logprobs, "rollout.routing_replay", reason))
        idle += [(True, name, why) for name, why in idle_options(self)]
        notes = without_effect(idle, set_options)
        # These are compared with the log-probabilities of the update, which are computed in other micro-batches.
        compares = self.has_reference_role or self.needs_old_logprobs
        if compares and self.train.precision != "fp32" and self.train.packing is False:
            notes.append(
                f"train.precision={self.train.precision} with train.packing=false: padding changes the rounding of "
                "log-probabilities, so the initial KL is close to 0 but not exactly 0"
            )
        notes += self.rollout.notes() + self.agent.notes(set_options, self.rollout.engine)
        corrects = self.algorithm.correction != "none" or getattr(self.algorithm, "bypass", False)
        return notes + self.asynchronous.notes(self.CORRECT, corrects)

    def sampling(self, step: int, temperature: float | None = None) -> SamplingConfig:
        """Return the sampling parameters of a step. Evaluations pass a temperature of their own."""
        return self.rollout.sampling(self.seed, step, temperature)

    @property
    def heldout_sampling(self) -> SamplingConfig:
        """Sampling parameters of responses to held-out prompts, which always use the same random numbers."""
        sampling = self.sampling(EVALUATION_STEP, self.evaluation.temperature)
        return replace(sampling, top_p=self.evaluation.top_p, top_k=self.evaluation.top_k)

    def weight_sync(self, gpus: int) -> tuple[str, str]:
        """Return the transport of weights to the engines and the reason for it; see `choose_weight_sync`.

        Args:
            gpus: number of GPUs of each machine.
        """
        # In the process of the trainer, an engine reads the weights without any transport.
        apart = self.HAS_ENGINES_APART and self.backend != "local"
        shares = apart and self.placement.colocate and (gpus > 0 or self.placement.nodes == 1)
        setting = SyncSetting(gpus=gpus, apart=apart, shares=shares, lora_rank=self.train.lora_rank)
        return choose_weight_sync(self.rollout.weight_sync, setting)

    def engine_arguments(self) -> Any:
        """Return the check of the arguments in `rollout.vllm`."""
        return load("engine arguments", "vllm", f"rollout.vllm={self.rollout.vllm}")(self)

    def rollout_engine(self) -> RolloutConfig:
        """Return the configuration of a rollout engine."""
        max_prompt = self.agent.longest_prompt(self.data.max_prompt_tokens, self.rollout.max_new_tokens)
        return self.rollout.engine_config(self.train.precision, max_prompt, self.placement, self.train.lora_rank)

    def train_engine(self, steps: int) -> TrainConfig:
        """Return the configuration of the training engine of the policy.

        Args:
            steps: number of training steps of the run.
        """
        return self.parallel.of(self.train.for_run(steps * self.updates_per_step, self.seed))
