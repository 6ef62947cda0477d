"""Options of this recipe. Those of all recipes on pairs are in training/options/supervised_options.py.

`--flag value` and `flag=value` are equivalent. `--config FILE` reads YAML. `--help all` describes every option. The
flags of OpenRLHF's train_dpo are accepted.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from components.ranges import NotNegative, Positive
from training.options.judged_options import JudgedOptions
from training.options.model_options import ModelOptions
from training.options.schema import Options, active_when, at_home, without_effect
from training.options.supervised_options import SupervisedTrainOptions


@dataclass(kw_only=True)
class DPOOptions(Options, group="algorithm"):
    """Loss on the log-probabilities of a pair."""

    loss: Literal["dpo", "kto", "orpo", "simpo"] = "dpo"
    """Preference loss. `dpo`: pairs, against a reference model. `kto`: single responses with a label (pairs are split
    into two), against a reference model. `orpo` and `simpo`: pairs, without a reference model."""
    beta: Positive = 0.1
    """Weight of the KL to the reference model in the objective. Larger values keep the policy closer to it. In orpo it
    is the weight of the odds ratio, in simpo the scale of the mean log-probabilities (the paper uses 2 to 10)."""
    label_smoothing: float = 0.0
    """Assumed share of pairs with swapped labels (conservative DPO), from 0 to below 0.5."""
    ipo: bool = False
    """Use the squared loss of IPO instead of the logistic loss."""
    nll_loss_coef: NotNegative = 0.0
    """Weight of the negative log-likelihood of the chosen responses, averaged over their tokens. 0 disables it. In orpo
    the loss itself has this term, with the weight 1."""
    simpo_gamma: NotNegative = active_when(0.5, loss=("simpo",))
    """Target difference between the implicit rewards of the two responses (gamma of SimPO)."""
    desirable_weight: Positive = active_when(1.0, loss=("kto",))
    """Weight of desirable responses. For unequal numbers, choose weights so that weight times number of the desirable
    responses is 1 to 1.33 times that of the undesirable ones."""
    undesirable_weight: Positive = active_when(1.0, loss=("kto",))
    """Weight of undesirable responses."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if not 0 <= self.label_smoothing < 0.5 or (self.label_smoothing and self.ipo):
            yield f"algorithm.label_smoothing={self.label_smoothing}; set 0 to below 0.5, and 0 with algorithm.ipo"
        if self.loss != "dpo" and (self.label_smoothing or self.ipo):
            yield f"algorithm.loss={self.loss} has neither label_smoothing nor ipo; remove them, or set loss=dpo"
        if self.loss in ("kto", "orpo") and self.nll_loss_coef:
            yield f"algorithm.nll_loss_coef={self.nll_loss_coef} has no place in algorithm.loss={self.loss}; set 0"


@dataclass(kw_only=True)
class ReferenceOptions(Options, group="reference"):
    """Reference model. Its log-probabilities are computed once, before training."""

    path: str | None = None
    """Folder or hub name of the reference model. Default: model.path."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = self.path and at_home(self.path)


@dataclass(kw_only=True)
class DPOConfig(JudgedOptions):
    """Direct preference optimization on pairs of responses, or KTO on single responses."""

    ADAPTERS: ClassVar = ("openrlhf.train_dpo",)
    LEARNS_RESPONSES: ClassVar[bool] = True

    model: ModelOptions = field(default_factory=ModelOptions)
    reference: ReferenceOptions = field(default_factory=ReferenceOptions)
    algorithm: DPOOptions = field(default_factory=DPOOptions)
    train: SupervisedTrainOptions = field(default_factory=lambda: SupervisedTrainOptions(learning_rate=1e-5))

    @property
    def reads_labels(self) -> bool:
        """See `JudgedOptions.reads_labels`."""
        return self.algorithm.loss == "kto"

    @property
    def has_reference(self) -> bool:
        """True if the loss compares the policy with a reference model."""
        return self.algorithm.loss in ("dpo", "kto")

    def notes(self, set_options: Collection[str]) -> list[str]:
        """See `SupervisedOptions.notes`."""
        why = f"algorithm.loss={self.algorithm.loss} has no reference model"
        idle = [(not self.has_reference, "reference.path", why)]
        return without_effect(idle, set_options) + super().notes(set_options)

    @property
    def models(self) -> dict[str, str]:
        """See `SupervisedOptions.models`."""
        if not (self.reference.path and self.has_reference):
            return super().models
        return super().models | {"reference.path": self.reference.path}
