"""Options of PPO with a critic and reward models, besides the groups that all recipes share.

`a.b=value` and `--a.b value` mean the same; `--config FILE` reads YAML. OpenRLHF's flags are accepted too: the table
plugins/openrlhf/openrlhf.yaml maps each flag to an option. Defaults are OpenRLHF's where it has one.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal

from components.ranges import Count, NotNegative, Range
from components.train.config import TrainConfig, TrainOptions
from training.options.evaluation_options import EvaluationOptions
from training.options.model_options import ModelOptions
from training.options.placement_options import PlacementOptions
from training.options.ppo_options import BY_RESPONSE, Aggregation, KLEstimator, PPOOptions, PPORunOptions
from training.options.reward_options import RewardOptions
from training.options.rl_options import PolicyTrainOptions
from training.options.schema import Options, active_when, at_home, errors_of, of_plugin, without_effect

Estimator = Literal["gae", "reinforce", "reinforce_baseline", "rloo", "grpo", "dr_grpo", "opo", "gpg", "grpo_passk"]
GROUPED = ("reinforce_baseline", "rloo", "grpo", "dr_grpo", "opo", "gpg", "grpo_passk")
"""Estimators that compare the responses to one prompt with each other."""
UNCLIPPED = ("sapo", "kl_cov", "reinforce")
"""Policy losses without a clip range."""
SPREAD = ("actor", "critic", "reference", "reward")
"""Roles whose number of machines can be set separately."""
COUNTS = {role: f"{role}_ranks" for role in SPREAD[:2]} | {role: f"{role}s" for role in SPREAD[2:]}
COUNTS["rollout"] = "rollout_engines"
"""Role -> option with its number of workers."""


@dataclass(kw_only=True)
class AlgorithmOptions(PPOOptions):
    """Advantage estimator, policy loss, KL penalty and dynamic sampling."""

    estimator: Estimator = "gae"
    """Advantage estimator. `gae` uses a critic. Without a critic: `reinforce` (REINFORCE++: whitened returns), and
    estimators that compare the responses to a prompt: `reinforce_baseline` (minus their mean, whitened), `rloo` (minus
    the mean of the others), `grpo`, `dr_grpo` (minus their mean; see also loss_aggregation), `opo` (minus their mean
    weighted by length), `gpg` and `grpo_passk` (lead of the best response). docs/algorithms.md has the formulas."""
    gamma: float = 1.0
    """Discount per token of the response."""
    lam: float = active_when(1.0, estimator=("gae",))
    """GAE's lambda. With 1 the advantage is the return minus the value, with 0 the one-step TD error."""
    std_norm: bool = active_when(True, estimator=("gae", "reinforce", "reinforce_baseline"))
    """Scale the advantages of a step to a standard deviation of 1 when whitening. Otherwise they are only centred."""
    loss_aggregation: Aggregation | None = None
    """Aggregation of token losses. Default: seq-mean-token-mean with gspo, sapo and geo_mean, otherwise token-mean. Dr.
    GRPO uses seq-mean-token-sum-norm, which divides by rollout.max_new_tokens."""
    kl_coef: NotNegative = 0.01
    """Coefficient of the KL penalty to the reference model. With 0 no reference role is started."""
    kl_estimator: KLEstimator = "k1"
    kl_in_reward: bool = active_when(True, kl_coef=True)
    correction: Literal["none", "tis", "icepop", "seq-mask", "seq-mask-tis"] = "none"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Importance weight of each token's loss: the policy's probability divided by that of the engine that sampled it.
    Weights outside correction_range are clamped to it (tis) or set to 0 (icepop). seq-mask-tis clamps them and sets all
    weights of a response to 0 if its mean ratio is outside; seq-mask does the same without clamping. gspo corrects its
    ratio instead."""
    filter_range: tuple[float, float] | None = of_plugin("dynamic_sampling", None)
    """Dynamic sampling: replace prompts whose mean score is not strictly between the two bounds, until the step is full
    or the data ends. Default: no prompt is replaced."""
    entropy_coef: NotNegative = 0.0
    reward_range: tuple[float, float] = (-10.0, 10.0)
    """Range to which rewards are clipped, after the comparison within groups."""
    truncated_factor: Annotated[float, Range(most=1)] | None = None
    """Factor from 0 to 1 that multiplies the reward of a truncated response. A negative value replaces the reward.
    Default: no change."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        if self.estimator in GROUPED and self.gamma != 1.0:
            yield f"algorithm.gamma={self.gamma}, and algorithm.estimator={self.estimator} has no discount; set gamma=1"
        for name in ("filter_range", "reward_range"):
            bounds = getattr(self, name)
            if bounds is not None and not bounds[0] < bounds[1]:
                yield f"algorithm.{name}={bounds[0]} {bounds[1]}; set the lower bound first"
        if self.kl_target is not None and not self.kl_coef > 0:
            yield f"algorithm.kl_target={self.kl_target} with algorithm.kl_coef={self.kl_coef}; set both above 0"


@dataclass(kw_only=True)
class CriticOptions(Options, group="critic"):
    """The value function, with algorithm.estimator=gae. Optimizer options that are not set are those of the policy."""

    path: str | None = None
    """Initial model of the critic. Default: the first of reward_model.path, or model.path with a new head."""
    value_clip: float = 0.5
    """Maximum change of a value per step."""
    warmup_steps: int = 0
    """Number of initial steps in which only the critic is trained."""
    save: bool = False
    """Save the critic in checkpoints/step_N/critic."""
    learning_rate: float = 9e-6
    """Peak learning rate."""
    betas: tuple[float, float] | None = None
    """Decay per optimizer step of AdamW's first and second moments."""
    eps: float | None = None
    """Term added to the square root of AdamW's second moment."""
    weight_decay: float | None = None
    """Decoupled weight decay per step, multiplied by the learning rate."""
    max_grad_norm: float | None = None
    """Maximum global 2-norm of the gradients. Larger gradients are scaled down."""
    lr_scheduler: str | None = None
    """Learning-rate schedule after the warm-up, as in train.lr_scheduler."""
    lr_warmup_ratio: float | None = None
    """Fraction of the run's optimizer steps in which the learning rate rises linearly from 0."""
    min_lr_ratio: float | None = None
    """Final learning rate as a fraction of learning_rate."""

    def __post_init__(self) -> None:
        self.path = self.path and at_home(self.path)
        super().__post_init__()

    @property
    def optimizer(self) -> dict[str, Any]:
        """Optimizer options that differ from the policy's."""
        options = {option.name: getattr(self, option.name, None) for option in fields(TrainOptions)}
        return {name: value for name, value in options.items() if value is not None}

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from errors_of("critic.", TrainOptions, **self.optimizer)


@dataclass(kw_only=True)
class RewardModelOptions(Options, group="reward_model"):
    """Reward models, which replace reward.source."""

    path: str | None = None
    """Path of a sequence classifier with one label and the policy's vocabulary. Separate several with commas."""
    weights: list[float] | None = None
    """Weight of each reward model in the sum of their scores. Default: 1 each."""
    normalize: bool = active_when(False, path=True)
    """Normalise rewards and the critic's values by the mean and standard deviation in the models' config.json."""
    value_head_prefix: str = "score"
    """Name of the head's weights in reward models and critics."""

    @property
    def paths(self) -> list[str]:
        """The models' folders or names."""
        return [at_home(name.strip()) for name in (self.path or "").split(",") if name.strip()]

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if self.weights is not None and self.path and len(self.weights) != len(self.paths):
            yield f"reward_model.weights has {len(self.weights)} numbers for {len(self.paths)} reward models"


@dataclass(kw_only=True)
class PPORewardOptions(RewardOptions):
    """Source of the rewards, and limits for reward code and servers."""

    heldout_source: str | None = None
    """Reward of held-out responses, in the format of `source`. The mean of the training reward is logged in addition,
    as eval/SOURCE_reward. Default: the training reward."""


@dataclass(kw_only=True)
class PPOPlacementOptions(PlacementOptions):
    """Workers and devices of each role. Without a GPU every worker is a process on the CPU."""

    nodes: Count = 1
    """Minimum number of machines. On a cluster more are used if the roles need more."""
    colocate: bool = False
    """All roles with a model, including the engines, share devices."""
    colocate_models: bool = active_when(False, colocate=False)
    """All roles with a model except the engines share devices."""
    colocate_actor_reference: bool = active_when(False, colocate=False, colocate_models=False)
    """Actor and reference share devices."""
    colocate_critic_reward: bool = active_when(False, colocate=False, colocate_models=False)
    """Critic and reward models share devices."""
    actor_nodes: Count | None = None
    """Number of machines over which actor_ranks are spread. Default: `nodes`."""
    critic_ranks: Count | None = None
    """Number of processes that train the critic, on all machines. Default: an equal share of the devices."""
    critic_nodes: Count | None = None
    """Number of machines over which critic_ranks are spread. Default: `nodes`."""
    reference_nodes: Count | None = None
    """Number of machines over which the references are spread. Default: `nodes`."""
    rewards: Count | None = None
    """Number of reward workers. With reward models each takes devices; otherwise the default is one process."""
    reward_nodes: Count | None = None
    """Number of machines over which the reward workers are spread. Default: `nodes`."""

    def nodes_of(self, role: str) -> int:
        """Return the number of machines over which a role is spread."""
        nodes: int | None = getattr(self, f"{role}_nodes")
        return nodes or self.nodes

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        for role in SPREAD:
            count = getattr(self, COUNTS[role])
            nodes = self.nodes_of(role)
            if count is not None and count % nodes:
                yield f"placement.{COUNTS[role]}={count} cannot be spread over placement.{role}_nodes={nodes} evenly"


@dataclass(kw_only=True)
class PPOConfig(PPORunOptions):
    """PPO, REINFORCE++, RLOO and GRPO, structured as in OpenRLHF."""

    ADAPTERS: ClassVar = ("openrlhf.train_ppo",)

    prompts_per_step: Count = 1024
    """Number of prompts per training step."""
    samples_per_prompt: Count = 1
    """Number of responses (or episodes) sampled per prompt."""
    model: ModelOptions = field(default_factory=lambda: ModelOptions(attn_implementation="auto"))
    reward: PPORewardOptions = field(default_factory=PPORewardOptions)  # pyright: ignore[reportIncompatibleVariableOverride]
    reward_model: RewardModelOptions = field(default_factory=RewardModelOptions)
    algorithm: AlgorithmOptions = field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default_factory=AlgorithmOptions
    )
    critic: CriticOptions = field(default_factory=CriticOptions)
    train: PolicyTrainOptions = field(
        default_factory=lambda: PolicyTrainOptions(
            mini_batch_size=128,
            zero_stage=2,
            lr_scheduler="cosine_with_min_lr",
            lr_warmup_ratio=0.03,
            min_lr_ratio=0.1,
        )
    )
    evaluation: EvaluationOptions = field(default_factory=lambda: EvaluationOptions(temperature=0.6))
    placement: PPOPlacementOptions = field(default_factory=PPOPlacementOptions)  # pyright: ignore[reportIncompatibleVariableOverride]

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        algorithm = self.algorithm
        for role in ("actor", "critic"):
            count = getattr(self.placement, COUNTS[role]) or 1
            if self.mini_batch_size < count and (role == "actor" or self.needs_critic):
                yield (
                    f"train.mini_batch_size={self.mini_batch_size} leaves some of the {count} {role} ranks without a "
                    f"response; raise it, or lower placement.{role}_ranks"
                )
        if self.samples_per_prompt < 2 and (algorithm.estimator in GROUPED or algorithm.filter_range):
            cause = f"algorithm.estimator={algorithm.estimator}"
            if algorithm.filter_range:
                cause = "algorithm.filter_range"
            yield (
                f"{cause} compares the responses to one prompt, but samples_per_prompt={self.samples_per_prompt}; set "
                "it to 2 or more"
            )
        if algorithm.overlong_buffer is not None and self.agent.func_path:
            yield "algorithm.overlong_buffer is about one response, not an episode of agent.func_path; unset one"

    def _faults_of_reward(self) -> Iterator[str]:
        if self.agent.rewarded_by == "reward":
            yield "agent.rewarded_by=reward is not in this recipe; set it to environment, or use recipes/grpo"
        sources = {
            "reward_model.path": self.reward_model.path,
            "reward.source": self.reward.source,
            "agent.func_path": self.agent.func_path,
        }
        if sum(value is not None for value in sources.values()) > 1:
            yield f"{', '.join(f'{name}={value}' for name, value in sources.items())}: set one, the others to null"
        elif self.reward_model.path is None:
            yield from super()._faults_of_reward()
        if self.reward.heldout_source and self.agent.func_path:
            yield "reward.heldout_source, but an agent's environment scores held-out episodes too; unset one"

    @property
    def reward_source(self) -> str | None:
        """Reward code or servers. None if reward models or an agent's environment give the rewards."""
        if self.reward_model.path:
            return None
        return super().reward_source

    @property
    def scores_with_experience(self) -> bool:
        """True if rewards are computed together with the log-probs, False if generation needs or computes them."""
        return self.filter_range is None and self.agent.func_path is None

    @property
    def needs_critic(self) -> bool:
        """True if a critic is trained."""
        return self.algorithm.estimator == "gae"

    @property
    def critic_start(self) -> str:
        """Path of the model from which the critic is loaded."""
        return self.critic.path or next(iter(self.reward_model.paths), self.model.path)

    @property
    def aggregation(self) -> Aggregation:
        """Aggregation of token losses in the policy loss."""
        usual: Aggregation = "token-mean"
        if self.algorithm.policy_loss in BY_RESPONSE:
            # Their ratio belongs to a response, so a mean over tokens would count long responses more.
            usual = "seq-mean-token-mean"
        return self.algorithm.loss_aggregation or usual

    @property
    def corrects_loss(self) -> bool:
        """True if the loss of each token has an importance weight. gspo corrects its ratio instead."""
        return self.algorithm.correction != "none" and self.algorithm.policy_loss != "gspo"

    @property
    def old_policy(self) -> str:
        """Column with the log-probabilities of the old policy: the trainer's, or the engine's in a corrected gspo."""
        if self.algorithm.correction != "none" and not self.corrects_loss:
            return "rollout_logprob"
        return "logprob"

    def optimizer_steps(self, count: int) -> int:
        """Return the number of optimizer steps for `count` responses. It is rounded: at the end of filtered data, an
        additional step with a few responses would change the policy as much as a complete one.
        """
        return max(round(count / self.mini_batch_size), 1)

    @property
    def freezes_models(self) -> bool:
        """See `RLOptions.freezes_models`."""
        return super().freezes_models or self.reward_model.path is not None

    def critic_engine(self, steps: int) -> TrainConfig:
        """Return the configuration of the critic's training engine, for a run of `steps` steps."""
        return replace(self.train_engine(steps), ema_beta=None, lora_path="", **self.critic.optimizer)

    def notes(self, set_options: Collection[str]) -> list[str]:
        """Return notes for the user that are printed before the run starts.

        Args:
            set_options: names of the options that the user has set.
        """
        algorithm = self.algorithm
        notes = []
        if self.needs_reference and algorithm.kl_in_reward == (algorithm.kl_estimator not in ("k1", "abs")):
            advice = "k2, k3 or one with a + suits a loss"
            if algorithm.kl_in_reward:
                advice = "k1 suits a reward"
            notes.append(f"algorithm.kl_estimator={algorithm.kl_estimator}: {advice}")
        if algorithm.filter_range and self.reward_model.path and algorithm.filter_range == (0.0, 1.0):
            notes.append("algorithm.filter_range is 0 to 1, and the scores of a reward model may be any number")
        critics = [f"critic.{option.name}" for option in fields(CriticOptions)]
        critics += ["placement.critic_ranks", "placement.critic_nodes"]
        references = ["placement.reference_nodes", "placement.colocate_actor_reference"]
        clips = ["algorithm.clip_low", "algorithm.clip_high"]
        idle: list[tuple[bool, str, list[str]]] = [
            (not self.needs_critic, f"algorithm.estimator={algorithm.estimator} trains no critic", critics),
            (not self.needs_reference, "algorithm.kl_coef=0", references),
            (self.is_own_reference, "the policy with its adapters off is the reference", references),
            (not self.reward_model.path, "only reward models take a device", ["placement.colocate_critic_reward"]),
            (
                algorithm.policy_loss in UNCLIPPED,
                f"algorithm.policy_loss={algorithm.policy_loss} clips no ratio",
                clips,
            ),
            (algorithm.correction == "none", "algorithm.correction=none", ["algorithm.correction_range"]),
            (self.old_policy != "logprob", "gspo corrects its ratio itself", ["algorithm.correction_range"]),
            (self.evaluation.path is None, "there is no evaluation.path", ["reward.heldout_source"]),
        ]
        notes += without_effect([(is_idle, name, why) for is_idle, why, names in idle for name in names], set_options)
        return notes + super().notes(set_options)
