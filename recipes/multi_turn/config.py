"""Every option of the recipe, in groups. `a.b=value` and `--a.b value` mean the same; `--config FILE` reads YAML."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from agents.loading import check_agent
from agents.options import AgentOptions
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
    RolloutOptions,
    RunOptions,
    new_run_dir,
)

RECIPE = Path(__file__).parent.name


@dataclass(kw_only=True)
class AlgorithmOptions:
    """What a turn, or a whole episode, is compared with, and how far one step may go."""

    estimator: Literal["reinforce", "reinforce_baseline", "rloo", "grpo", "dr_grpo", "gpg", "grpo_passk"] = (
        "reinforce_baseline"
    )
    """What becomes of a reward: itself; less the mean of all episodes of the prompt (reinforce_baseline, and dr_grpo,
    which does not whiten); less the mean of the others; divided by their deviation as well; and their relatives."""
    whiten: bool | None = None
    """Shift and scale the advantages of all tokens of a step to mean 0 and standard deviation 1. Default: with
    reinforce and reinforce_baseline."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """What the tokens of a turn are worth: what the whole episode has earned, or what it earned from this turn on,
    beside the same turn of the prompt's other episodes."""
    turn_gamma: float = 1.0
    """Discount per turn, with credit by turn."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How tokens are weighed: each the same, each episode the same, or each episode's sum, divided by the most that its
    turns may be long with -norm (Dr. GRPO)."""
    clip_low: float = 0.2
    """The policy ratio is clipped at 1 minus this."""
    clip_high: float = 0.2
    """And at 1 plus this."""
    kl_coef: float = 0.0
    """Weight of the KL to the starting policy, which is taken off the reward of each token. 0: no reference role is
    started."""
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Which estimator of the KL; k1 is the unbiased one in a reward."""
    correction: Literal["none", "tis", "icepop"] = "none"
    """Weigh each token's loss by the policy's probability over that of the engine which sampled it, perhaps with older
    weights: weights outside of correction_range are cut to it (tis), or 0 (icepop)."""
    correction_range: tuple[float, float] = (0.5, 5.0)
    """Lowest and highest such weight."""

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened."""
        return self.estimator.startswith("reinforce") if self.whiten is None else self.whiten


@dataclass(kw_only=True)
class MultiTurnConfig(RunOptions):
    """Policy gradients over episodes of any number of turns."""

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
    """Prompts that are played and trained on in a step."""
    samples_per_prompt: int = 8
    """Episodes from each; algorithm.estimator compares them with each other."""
    minibatches: int = 1
    """Optimizer steps into which a step's episodes are cut; 1 is strictly on-policy."""
    epochs: int = 1
    """How often a step's episodes are gone through."""
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
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
        needed = {"model.path": self.model.path, "data.path": self.data.path, "agent.func_path": self.agent.func_path}
        for name, value in needed.items():
            if not value:
                raise ConfigError(f"{name} is empty; set {name}=..., or run without options for the demonstration")
        for name in ("prompts_per_step", "samples_per_prompt", "minibatches", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; set it to at least 1")
        episodes = self.prompts_per_step * self.samples_per_prompt
        if episodes % self.minibatches:
            raise ConfigError(
                f"minibatches={self.minibatches} does not divide a step's {episodes} episodes (prompts_per_step="
                f"{self.prompts_per_step} x samples_per_prompt={self.samples_per_prompt}); set a divisor"
            )
        if episodes < (self.placement.actor_ranks or 1):
            raise ConfigError(
                f"a step has {episodes} episodes, fewer than placement.actor_ranks={self.placement.actor_ranks}; raise "
                "prompts_per_step, or lower the other"
            )
        if self.evaluation.path is None and (self.evaluation.every > 0 or self.evaluation.best_metric):
            raise ConfigError("evaluation.every or evaluation.best_metric without evaluation.path; set the path too")
        self.asynchronous.check(
            self.placement.collocate, self.backend, self.prompts_per_step, "placement.collocate=false"
        )
        check_agent(str(self.agent.func_path))
        self._check_algorithm()

    def _check_algorithm(self) -> None:
        own = self.algorithm
        if own.estimator != "reinforce" and self.samples_per_prompt < 2:
            raise ConfigError(
                f"algorithm.estimator={own.estimator} compares the episodes of one prompt, but samples_per_prompt="
                f"{self.samples_per_prompt}; set it to 2 or more"
            )
        if not 0 <= own.clip_low <= 1 or own.clip_high < 0:
            raise ConfigError(
                f"the ratio cannot be clipped to 1 - {own.clip_low} and 1 + {own.clip_high}; set algorithm.clip_low "
                "from 0 to 1, and algorithm.clip_high to 0 or more"
            )
        if not 0 <= own.turn_gamma <= 1:
            raise ConfigError(f"algorithm.turn_gamma={own.turn_gamma}; set a discount from 0 to 1")
        if not 0 <= own.kl_coef < math.inf:
            raise ConfigError(f"algorithm.kl_coef={own.kl_coef}; set it to 0 or more")
        if not 0 <= own.correction_range[0] < own.correction_range[1]:
            raise ConfigError(f"algorithm.correction_range={own.correction_range}; set two weights, the lower first")

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
        return self.minibatches * self.epochs > 1 or self.needs_reference or self.algorithm.correction != "none"

    @property
    def groups(self) -> int:
        """Roles that hold the policy."""
        return 3 if self.needs_reference else 2

    def steps(self, num_prompts: int) -> int:
        """Steps that so many prompts fill."""
        return num_prompts // self.prompts_per_step

    def arithmetic(self, num_prompts: int) -> str:
        """How much of what a run does, in a sentence."""
        total, episodes = num_prompts * self.data.passes, self.prompts_per_step * self.samples_per_prompt
        steps = self.steps(total)
        unused = total - steps * self.prompts_per_step
        return (
            f"{steps} steps of {self.prompts_per_step} prompts x {self.samples_per_prompt} "
            f"episodes = {episodes}; in each {self.minibatches * self.epochs} optimizer steps "
            f"of {episodes // self.minibatches} episodes, in micro-batches of at most {self.train.max_tokens} tokens"
            + (f"; the last {unused} prompts fill no step and are not used" if unused else "")
        )

    def notes(self, given: Collection[str]) -> list[str]:
        """What a user who has named the options `given` should know of before the run starts."""
        idle = [
            (not self.needs_reference, "algorithm.kl_estimator", "algorithm.kl_coef=0"),
            (not self.needs_reference, "placement.references", "algorithm.kl_coef=0"),
            (self.algorithm.credit != "turn", "algorithm.turn_gamma", "algorithm.credit=trajectory"),
            (self.algorithm.correction == "none", "algorithm.correction_range", "algorithm.correction=none"),
            (self.evaluation.path is None, "evaluation.samples_per_prompt", "there is no evaluation.path"),
            *((not self.train.lora_rank, f"train.{name}", "train.lora_rank=0") for name in LORAS_OWN),
        ]
        found = [f"no effect of {name}: {why}" for is_idle, name, why in idle if is_idle and name in given]
        found += [*self.rollout.notes(given), *self.agent.notes(given, self.rollout.engine)]
        return found + self.asynchronous.notes(given, "algorithm.correction=tis", self.algorithm.correction != "none")

    def sampling(self, step: int, temperature: float | None = None) -> SamplingConfig:
        """How the turns of a step are drawn; evaluations name a temperature of their own."""
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
