"""Options of this recipe. Those of all recipes on pairs are in training/options/supervised_options.py.

`--flag value` and `flag=value` are equivalent. `--config FILE` reads YAML. `--help all` describes every option. The
flags of OpenRLHF's train_dpo are accepted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from components.ranges import NotNegative, Positive
from training.options.model_options import ModelOptions
from training.options.pair_options import PairOptions
from training.options.schema import Options, at_home
from training.options.supervised_options import SupervisedTrainOptions


@dataclass(kw_only=True)
class DPOOptions(Options, group="algorithm"):
    """Loss on the log-probabilities of a pair."""

    beta: Positive = 0.1
    """Weight of the KL to the reference model in the objective. Larger values keep the policy closer to it."""
    label_smoothing: float = 0.0
    """Assumed share of pairs with swapped labels (conservative DPO), from 0 to below 0.5."""
    ipo: bool = False
    """Use the squared loss of IPO instead of the logistic loss."""
    nll_loss_coef: NotNegative = 0.0
    """Weight of the negative log-likelihood of the chosen responses, averaged over their tokens. 0 disables it."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if not 0 <= self.label_smoothing < 0.5 or (self.label_smoothing and self.ipo):
            yield f"algorithm.label_smoothing={self.label_smoothing}; set 0 to below 0.5, and 0 with algorithm.ipo"


@dataclass(kw_only=True)
class ReferenceOptions(Options, group="reference"):
    """Reference model. Its log-probabilities are computed once, before training."""

    path: str | None = None
    """Folder or hub name of the reference model. Default: model.path."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = self.path and at_home(self.path)


@dataclass(kw_only=True)
class DPOConfig(PairOptions):
    """Direct preference optimization on pairs of responses."""

    ADAPTERS: ClassVar = ("openrlhf.train_dpo",)
    LEARNS_RESPONSES: ClassVar[bool] = True

    model: ModelOptions = field(default_factory=ModelOptions)
    reference: ReferenceOptions = field(default_factory=ReferenceOptions)
    algorithm: DPOOptions = field(default_factory=DPOOptions)
    train: SupervisedTrainOptions = field(default_factory=lambda: SupervisedTrainOptions(learning_rate=1e-5))

    @property
    def models(self) -> dict[str, str]:
        """See `SupervisedOptions.models`."""
        if not self.reference.path:
            return super().models
        return super().models | {"reference.path": self.reference.path}
