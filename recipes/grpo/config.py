"""Every option of the recipe, in groups. `a.b=value` and `--a.b value` mean the same; `--config FILE` reads YAML."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from agents.loading import check_agent
from agents.options import AgentOptions
from components.data.rewards import check_reward
from components.data.scorers import default_scorer
from components.engines.config import RolloutConfig, SamplingConfig, TrainConfig, TrainOptions
from training.config import ConfigError
from training.options import (
    LORAS_OWN,
    AsyncOptions,
    CheckpointOptions,
    DataOptions,
    EvaluationOptions,
    LogOptions,
    ModelOptions,
    PlacementOptions,
    RewardOptions,
    RolloutOptions,
    RunOptions,
    new_run_dir,
)

RECIPE = Path(__file__).parent.name


@dataclass(kw_only=True)
class AlgorithmOptions:
    """What makes an answer good, and how far one step may go."""

    std_norm: bool = True
    """Divide the advantages of a prompt's answers by their standard deviation. Dr. GRPO does not."""
    clip_low: float = 0.2
    """The policy ratio is clipped at 1 minus this."""
    clip_high: float = 0.2
    """And at 1 plus this; more than clip_low is DAPO's clip-higher."""
    ratio: Literal["token", "sequence"] = "token"
    """Whose ratio is clipped: each token's, or the geometric mean over the answer (GSPO, whose aggregation and much
    smaller clip range are in gspo.yaml)."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How tokens are weighed: each the same (DAPO), each answer the same (the first GRPO), or each answer's sum,
    divided by rollout.max_new_tokens with -norm (Dr. GRPO)."""
    kl_coef: float = 0.0
    """Weight of the KL to the starting policy in the loss, aggregated as the loss is. 0: no reference role is
    started."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"] = "k3"
    """Which estimator of the KL; with a + its gradient is that of k2, the unbiased one."""
    filter_range: tuple[float, float] | None = None
    """Dynamic sampling: prompts whose answers' mean score is not between the two, the bounds excluded, are replaced
    until the step is full or the data at its end. Default: every prompt is trained on."""
    overlong_buffer: int | None = None
    """Answers lose reward over the last so many tokens before rollout.max_new_tokens (DAPO). Default: they do not."""
    overlong_penalty: float = 1.0
    """How much an answer of full length loses."""
    correction: Literal["none", "tis", "icepop"] = "none"
    """Weigh each token's loss by the policy's probability over that of the engine which sampled it: weights outside of
    correction_range are cut to it (tis), or 0 (icepop)."""
    correction_range: tuple[float, float] = (0.5, 5.0)
    """Lowest and highest such weight. What is beyond is logged as rollout/outside_share, also without a correction,
    where a step has several optimizer steps."""


@dataclass(kw_only=True)
class GRPOConfig(RunOptions):
    """Group relative policy optimisation."""

    ALIASES: ClassVar = {
        "rollout_engine": "rollout.engine",
        "verify_weight_sync": "rollout.verify_weight_sync",
        "agent_func_path": "agent.func_path",
        "async_train": "asynchronous.enabled",
        "async_queue_size": "asynchronous.queue_size",
        "partial_rollout": "asynchronous.partial_rollout",
    }

    run_dir: str = field(default_factory=lambda: new_run_dir(RECIPE))
    """Folder of everything that the run writes."""
    prompts_per_step: int = 64
    """Prompts that are answered and trained on in a step."""
    samples_per_prompt: int = 8
    """Answers to each, which are compared with each other."""
    minibatches: int = 1
    """Optimizer steps into which a step's answers are cut; 1 is strictly on-policy."""
    epochs: int = 1
    """How often a step's answers are gone through."""
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    agent: AgentOptions = field(default_factory=AgentOptions)
    asynchronous: AsyncOptions = field(default_factory=AsyncOptions)
    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)
    train: TrainOptions = field(default_factory=lambda: TrainOptions(precision="auto"))
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    log: LogOptions = field(default_factory=LogOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("model.path", self.model.path), ("data.path", self.data.path)):
            if not value:
                raise ConfigError(f"{name} is empty; set {name}=..., or run without options for the demonstration")
        for name in ("prompts_per_step", "minibatches", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; set it to at least 1")
        if self.samples_per_prompt < 2:
            raise ConfigError(
                f"samples_per_prompt={self.samples_per_prompt}: GRPO compares the answers to one prompt; set 2 or more"
            )
        answers = self.prompts_per_step * self.samples_per_prompt
        if answers % self.minibatches:
            raise ConfigError(
                f"minibatches={self.minibatches} does not divide a step's {answers} answers (prompts_per_step="
                f"{self.prompts_per_step} x samples_per_prompt={self.samples_per_prompt}); set a divisor"
            )
        if answers < (self.placement.actor_ranks or 1):
            raise ConfigError(
                f"a step has {answers} answers, fewer than placement.actor_ranks={self.placement.actor_ranks}; raise "
                "prompts_per_step, or lower the other"
            )
        if self.evaluation.path is None and (self.evaluation.every > 0 or self.evaluation.best_metric):
            raise ConfigError("evaluation.every or evaluation.best_metric without evaluation.path; set the path too")
        self.asynchronous.check(
            self.placement.collocate, self.backend, self.prompts_per_step, "placement.collocate=false"
        )
        if self.reward_source is None:
            check_agent(str(self.agent.func_path))
        else:
            check_reward(self.reward_source)
        self._check_algorithm()

    def _check_algorithm(self) -> None:
        own, (low, high) = self.algorithm, self.algorithm.correction_range
        if not 0 <= own.clip_low <= 1 or own.clip_high < 0:
            raise ConfigError(
                f"the ratio cannot be clipped to 1 - {own.clip_low} and 1 + {own.clip_high}; set algorithm.clip_low "
                "from 0 to 1, and algorithm.clip_high to 0 or more"
            )
        if not 0 <= own.kl_coef < math.inf:
            raise ConfigError(f"algorithm.kl_coef={own.kl_coef}; set it to 0 or more")
        if own.filter_range and self.asynchronous.partial_rollout:
            raise ConfigError(
                "algorithm.filter_range replaces prompts of a step, and asynchronous.partial_rollout carries some to "
                "the next; unset one of them"
            )
        if own.filter_range and not own.filter_range[0] < own.filter_range[1]:
            raise ConfigError(f"algorithm.filter_range={own.filter_range}; set two scores, the lower first")
        if own.overlong_buffer is not None and self.agent.func_path:
            raise ConfigError(
                "algorithm.overlong_buffer is about one answer, and agent.func_path plays episodes of several; unset "
                "one of them"
            )
        if not own.overlong_penalty >= 0:
            raise ConfigError(f"algorithm.overlong_penalty={own.overlong_penalty}; set it to 0 or more")
        if own.overlong_buffer is not None and not 1 <= own.overlong_buffer <= self.rollout.max_new_tokens:
            raise ConfigError(
                f"algorithm.overlong_buffer={own.overlong_buffer}; set 1 to rollout.max_new_tokens="
                f"{self.rollout.max_new_tokens}"
            )
        if not 0 <= low < high:
            raise ConfigError(f"algorithm.correction_range={low} {high}; set two ratios, the lower first")

    @property
    def reward_source(self) -> str | None:
        """Where rewards come from: what was named, else the scorer of the task that the data are of; None: from the
        agent's world.
        """
        if self.agent.func_path:
            if self.reward.source:
                raise ConfigError(
                    f"reward.source={self.reward.source}, but rewards come from the world of agent.func_path="
                    f"{self.agent.func_path}; set one of the two"
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
        """Whether there is a KL to measure."""
        return self.algorithm.kl_coef != 0

    @property
    def takes_turns(self) -> bool:
        """Whether the roles share what they run on, so that two at the same time would only be in each other's way."""
        return self.placement.collocate

    @property
    def checkpoint_folder(self) -> Path:
        """Where the step folders are."""
        return self.checkpoint.folder(self.run_dir)

    @property
    def looks_back(self) -> bool:
        """Whether the log-probabilities before the update are needed. With one optimizer step they are its own."""
        return self.minibatches * self.epochs > 1 or self.algorithm.correction != "none"

    @property
    def minibatch_size(self) -> int:
        """Answers of one optimizer step."""
        return self.prompts_per_step * self.samples_per_prompt // self.minibatches

    @property
    def groups(self) -> int:
        """Roles that hold the policy."""
        return 3 if self.needs_reference else 2

    def steps(self, num_prompts: int) -> int:
        """Steps that so many prompts fill; filtered prompts leave less for the last one, or fewer steps."""
        filtered = self.algorithm.filter_range is not None
        return (num_prompts + filtered * (self.prompts_per_step - 1)) // self.prompts_per_step

    def arithmetic(self, num_prompts: int) -> str:
        """How much of what a run does, in a sentence."""
        total, answers = num_prompts * self.data.passes, self.prompts_per_step * self.samples_per_prompt
        steps = self.steps(total)
        unused = max(total - steps * self.prompts_per_step, 0)
        return (
            f"{'at most ' * bool(self.algorithm.filter_range)}{steps} steps of {self.prompts_per_step} prompts x "
            f"{self.samples_per_prompt} answers = {answers}; in each {self.minibatches * self.epochs} optimizer steps "
            f"of {answers // self.minibatches} answers, in micro-batches of at most {self.train.max_tokens} tokens"
            + (f"; the last {unused} prompts fill no step and are not used" if unused else "")
        )

    def notes(self, given: Collection[str]) -> list[str]:
        """What a user who has named the options `given` should know of before the run starts."""
        own = self.algorithm
        idle = [
            (own.overlong_buffer is None, "algorithm.overlong_penalty", "algorithm.overlong_buffer is not set"),
            (not self.needs_reference, "algorithm.kl_estimator", "algorithm.kl_coef=0"),
            (not self.needs_reference, "placement.references", "algorithm.kl_coef=0"),
            (self.evaluation.path is None, "evaluation.samples_per_prompt", "there is no evaluation.path"),
            *((not self.train.lora_rank, f"train.{name}", "train.lora_rank=0") for name in LORAS_OWN),
        ]
        found = [f"no effect of {name}: {why}" for is_idle, name, why in idle if is_idle and name in given]
        found += [*self.rollout.notes(given), *self.agent.notes(given, self.rollout.engine)]
        found += self.asynchronous.notes(given, "algorithm.correction=tis", own.correction != "none")
        if own.filter_range and self.train.lr_scheduler != "constant":
            found.append(
                "the schedule of the learning rate is that of the most steps that there can be; filtering ends "
                "the run before it"
            )
        return found

    def sampling(self, step: int, temperature: float | None = None) -> SamplingConfig:
        """How the answers of a step are drawn; evaluations name a temperature of their own."""
        return self.rollout.sampling(self.seed, step, temperature)

    def rollout_engine(self) -> RolloutConfig:
        """The engine of a rollout instance."""
        longest = self.agent.longest_prompt(self.data.max_prompt_tokens, self.rollout.max_new_tokens)
        return self.rollout.engine_config(self.dtype, longest, self.placement.collocate)

    def train_engine(self, steps: int) -> TrainConfig:
        """The engine of the policy's ranks, in a run of so many steps."""
        return self.train.for_run(steps * self.epochs * self.minibatches, self.seed)

    @property
    def dtype(self) -> str:
        """Of models that are not trained."""
        return "bfloat16" if self.train.precision == "bf16" else "float32"
