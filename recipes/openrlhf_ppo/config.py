"""The options of PPO with a critic and reward models, beside the groups that all recipes share.

`a.b=value` and `--a.b value` mean the same; `--config FILE` reads YAML. OpenRLHF's flags are taken too: the table
plugins/openrlhf/openrlhf.yaml says which option each of them is. Defaults are OpenRLHF's where it has any.
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
"""Roles that may be spread over machines of their own."""
COUNTS = {role: f"{role}_ranks" for role in SPREAD[:2]} | {role: f"{role}s" for role in SPREAD[2:]}
COUNTS["rollout"] = "rollout_engines"
"""Role -> the option that says how many workers it has."""


@dataclass(kw_only=True)
class AlgorithmOptions(PPOOptions):
    """Advantage estimator, policy loss, KL penalty and dynamic sampling."""

    estimator: Estimator = "gae"
    """How credit is given: `gae` with a critic; without one `reinforce` (REINFORCE++: whitened returns) and, within
    each prompt's responses, `reinforce_baseline` (less their mean, whitened), `rloo` (less the mean of the others),
    `grpo`, `dr_grpo` (less their mean; see loss_aggregation too), `opo` (less their mean by length), `gpg` and
    `grpo_passk` (the best one's lead); docs/algorithms.md has the formulas."""
    gamma: float = 1.0
    """Discount per token of the response."""
    lam: float = active_when(1.0, estimator=("gae",))
    """GAE's lambda: 1 is the return minus the value, 0 the one-step error."""
    std_norm: bool = active_when(True, estimator=("gae", "reinforce", "reinforce_baseline"))
    """Whitening scales the advantages of a step to a standard deviation of 1. Otherwise it only centres them."""
    loss_aggregation: Aggregation | None = None
    """How tokens are weighed. Default: with gspo, sapo and geo_mean seq-mean-token-mean, else token-mean. That of Dr.
    GRPO is seq-mean-token-sum-norm, which divides by rollout.max_new_tokens."""
    kl_coef: NotNegative = 0.01
    """Weight of the KL penalty to the reference model. 0: no reference role is started."""
    kl_estimator: KLEstimator = "k1"
    kl_in_reward: bool = active_when(True, kl_coef=True)
    correction: Literal["none", "tis", "icepop", "seq-mask", "seq-mask-tis"] = "none"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Weigh each token's loss by the policy's probability over that of the engine which sampled it: weights outside of
    correction_range are cut to it (tis), or 0 (icepop), or cut, and all 0 in a response whose mean ratio is outside
    (seq-mask-tis), or that without the cut (seq-mask). gspo corrects its ratio instead."""
    filter_range: tuple[float, float] | None = of_plugin("dynamic_sampling", None)
    """Dynamic sampling: prompts whose responses' mean score is not between the two, the bounds excluded, are replaced
    until the step is full or the data at its end. Default: every prompt is trained on."""
    entropy_coef: NotNegative = 0.0
    reward_range: tuple[float, float] = (-10.0, 10.0)
    """Rewards, after the comparison within groups, are cut to this range."""
    truncated_factor: Annotated[float, Range(most=1)] | None = None
    """Responses that were cut off: their reward is multiplied by this if it is 0 to 1, replaced by it if negative."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        if self.estimator in GROUPED and self.gamma != 1.0:
            yield f"algorithm.gamma={self.gamma}, and algorithm.estimator={self.estimator} has no discount; set gamma=1"
        for name in ("filter_range", "reward_range"):
            given = getattr(self, name)
            if given is not None and not given[0] < given[1]:
                yield f"algorithm.{name}={given[0]} {given[1]}; set the lower bound first"
        if self.kl_target is not None and not self.kl_coef > 0:
            yield f"algorithm.kl_target={self.kl_target} with algorithm.kl_coef={self.kl_coef}; set both above 0"


@dataclass(kw_only=True)
class CriticOptions(Options, group="critic"):
    """The value function, where algorithm.estimator=gae. What is not named of its optimizer is the policy's."""

    path: str | None = None
    """What it starts from. Default: the first of reward_model.path, else model.path with a new head."""
    value_clip: float = 0.5
    """It may move a value by this much per step."""
    warmup_steps: int = 0
    """It learns alone up to and including this step."""
    save: bool = False
    """Save it beside the policy, in checkpoints/step_N/critic."""
    learning_rate: float = 9e-6
    """Peak learning rate."""
    betas: tuple[float, float] | None = None
    """Decay per optimizer step of AdamW's first and second moments."""
    eps: float | None = None
    """Added to the root of AdamW's second moment."""
    weight_decay: float | None = None
    """Decoupled decay per step, in units of the learning rate."""
    max_grad_norm: float | None = None
    """Gradients whose global 2-norm is larger are scaled down to it."""
    lr_scheduler: str | None = None
    """What follows the warm-up, as train.lr_scheduler."""
    lr_warmup_ratio: float | None = None
    """Share of the run's optimizer steps in which the learning rate rises linearly from 0."""
    min_lr_ratio: float | None = None
    """Where the decay ends, as a share of learning_rate."""

    def __post_init__(self) -> None:
        self.path = self.path and at_home(self.path)
        super().__post_init__()

    @property
    def optimizer(self) -> dict[str, Any]:
        """What is not as for the policy."""
        own = {option.name: getattr(self, option.name, None) for option in fields(TrainOptions)}
        return {name: value for name, value in own.items() if value is not None}

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from errors_of("critic.", TrainOptions, **self.optimizer)


@dataclass(kw_only=True)
class RewardModelOptions(Options, group="reward_model"):
    """Models that score responses, in place of reward.source."""

    path: str | None = None
    """A sequence classifier with one label and the policy's vocabulary; several with commas between."""
    weights: list[float] | None = None
    """Weight of each, where there are several. Default: 1 each."""
    normalize: bool = active_when(False, path=True)
    """Shift and scale their rewards, and the critic's values, by the mean and std in their config.json."""
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
    """Source of the rewards, and the limits of reward code and servers."""

    heldout_source: str | None = None
    """Scores held-out responses in place of the reward that is trained on, as `source`. Their mean under that reward
    is logged beside it, as eval/SOURCE_reward. Default: that reward scores them."""


@dataclass(kw_only=True)
class PPOPlacementOptions(PlacementOptions):
    """Workers and devices of each role. Without a GPU every worker is a process on the CPU."""

    nodes: Count = 1
    """Machines, at least: on a cluster roles that need more have more."""
    colocate: bool = False
    """All roles with a model, the engines too, share the devices."""
    colocate_models: bool = active_when(False, colocate=False)
    """All roles with a model but the engines share devices."""
    colocate_actor_reference: bool = active_when(False, colocate=False, colocate_models=False)
    """Actor and reference share devices."""
    colocate_critic_reward: bool = active_when(False, colocate=False, colocate_models=False)
    """Critic and reward models share devices."""
    actor_nodes: Count | None = None
    """Machines over which actor_ranks are spread. Default: all of `nodes`."""
    critic_ranks: Count | None = None
    """Processes that train the critic, on all machines. Default: an even share of the devices, as for the actor."""
    critic_nodes: Count | None = None
    """Machines over which they are spread. Default: all of `nodes`."""
    reference_nodes: Count | None = None
    """Machines over which the references are spread. Default: all of `nodes`."""
    rewards: Count | None = None
    """Instances of the reward. They take devices where there are reward models, and are one process otherwise."""
    reward_nodes: Count | None = None
    """Machines over which they are spread. Default: all of `nodes`."""

    def nodes_of(self, role: str) -> int:
        """Machines over which a role is spread."""
        nodes: int | None = getattr(self, f"{role}_nodes")
        return self.nodes if nodes is None else nodes

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        for role in SPREAD:
            count, nodes = getattr(self, COUNTS[role]), self.nodes_of(role)
            if count is not None and count % nodes:
                yield f"placement.{COUNTS[role]}={count} cannot be spread over placement.{role}_nodes={nodes} evenly"


@dataclass(kw_only=True)
class PPOConfig(PPORunOptions):
    """PPO, REINFORCE++, RLOO and GRPO, in OpenRLHF's shape."""

    ADAPTERS: ClassVar = ("openrlhf.train_ppo",)

    prompts_per_step: Count = 1024
    """Prompts of a training step."""
    samples_per_prompt: Count = 1
    """Responses, or episodes, to each."""
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
        own, placement = self.algorithm, self.placement
        for role in ("actor", "critic"):
            count = getattr(placement, COUNTS[role]) or 1
            if self.mini_batch_size < count and (role == "actor" or self.needs_critic):
                yield (
                    f"train.mini_batch_size={self.mini_batch_size} leaves some of the {count} {role} ranks without a "
                    f"response; raise it, or lower placement.{role}_ranks"
                )
        if self.samples_per_prompt < 2 and (own.estimator in GROUPED or own.filter_range):
            yield (
                f"algorithm.estimator={own.estimator} with algorithm.filter_range={own.filter_range} compares the "
                f"responses to one prompt, but samples_per_prompt={self.samples_per_prompt}; set it to 2 or more"
            )
        if own.overlong_buffer is not None and self.agent.func_path:
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
        """Reward code or servers; None where reward models, or an agent's environment, say what a response is worth."""
        return None if self.reward_model.path else super().reward_source

    @property
    def scores_with_experience(self) -> bool:
        """True if rewards are computed together with the log-probs; False if generation needs them, or makes them."""
        return self.filter_range is None and self.agent.func_path is None

    @property
    def needs_critic(self) -> bool:
        """Whether values are learnt."""
        return self.algorithm.estimator == "gae"

    @property
    def critic_start(self) -> str:
        """What the critic is loaded from."""
        return self.critic.path or next(iter(self.reward_model.paths), self.model.path)

    @property
    def aggregation(self) -> Aggregation:
        """How tokens are weighed in the policy's loss."""
        own = self.algorithm
        return own.loss_aggregation or ("seq-mean-token-mean" if own.policy_loss in BY_RESPONSE else "token-mean")

    @property
    def corrects_loss(self) -> bool:
        """Whether the loss of each token has a weight. gspo corrects its ratio instead."""
        return self.algorithm.correction != "none" and self.algorithm.policy_loss != "gspo"

    @property
    def old_policy(self) -> str:
        """Whose log-probabilities the ratio starts from: the trainer's, or the engine's in a corrected gspo."""
        corrected = self.algorithm.correction != "none" and not self.corrects_loss
        return "rollout_logprob" if corrected else "logprob"

    def optimizer_steps(self, count: int) -> int:
        """All of mini_batch_size, but at the end of filtered data, where one of a few responses would move as far."""
        return max(round(count / self.mini_batch_size), 1)

    @property
    def freezes_models(self) -> bool:
        """See `RLOptions.freezes_models`."""
        return super().freezes_models or self.reward_model.path is not None

    def critic_engine(self, steps: int) -> TrainConfig:
        """The engine of the critic's ranks, in a run of so many steps."""
        return replace(self.train_engine(steps), ema_beta=None, lora_path="", **self.critic.optimizer)

    def notes(self, set_options: Collection[str]) -> list[str]:
        """Return notes for the user before the run starts; `set_options` are those that the user has set."""
        own = self.algorithm
        found = []
        if self.needs_reference and own.kl_in_reward == (own.kl_estimator not in ("k1", "abs")):
            advice = "k1 suits a reward" if own.kl_in_reward else "k2, k3 or one with a + suits a loss"
            found.append(f"algorithm.kl_estimator={own.kl_estimator}: {advice}")
        if own.filter_range and self.reward_model.path and own.filter_range == (0.0, 1.0):
            found.append("algorithm.filter_range is 0 to 1, and the scores of a reward model may be any number")
        critics = [f"critic.{option.name}" for option in fields(CriticOptions)]
        critics += ["placement.critic_ranks", "placement.critic_nodes"]
        references = ["placement.reference_nodes", "placement.colocate_actor_reference"]
        clips = ["algorithm.clip_low", "algorithm.clip_high"]
        idle: list[tuple[bool, str, list[str]]] = [
            (not self.needs_critic, f"algorithm.estimator={own.estimator} trains no critic", critics),
            (not self.needs_reference, "algorithm.kl_coef=0", references),
            (self.is_own_reference, "the policy with its adapters off is the reference", references),
            (not self.reward_model.path, "only reward models take a device", ["placement.colocate_critic_reward"]),
            (own.policy_loss in UNCLIPPED, f"algorithm.policy_loss={own.policy_loss} clips no ratio", clips),
            (own.correction == "none", "algorithm.correction=none", ["algorithm.correction_range"]),
            (self.old_policy != "logprob", "gspo corrects its ratio itself", ["algorithm.correction_range"]),
            (self.evaluation.path is None, "there is no evaluation.path", ["reward.heldout_source"]),
        ]
        found += without_effect([(is_idle, name, why) for is_idle, why, names in idle for name in names], set_options)
        return found + super().notes(set_options)
