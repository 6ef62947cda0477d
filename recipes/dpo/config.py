"""The options of this recipe, beside those that recipes on pairs share; `--help all` describes them.

`--flag value` and `flag=value` mean the same; `--config FILE` reads YAML. OpenRLHF's names of train_dpo are understood.
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
    """The loss on the log-probabilities of a pair."""

    beta: Positive = 0.1
    """Weight of the KL to the reference model in what is optimised."""
    label_smoothing: float = 0.0
    """Share of the labels taken to be wrong (conservative DPO)."""
    ipo: bool = False
    """The squared loss of IPO instead of the logistic one."""
    nll_loss_coef: NotNegative = 0.0
    """Weight of the chosen responses' own negative log-likelihood, per token of a response."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if not 0 <= self.label_smoothing < 0.5 or (self.label_smoothing and self.ipo):
            yield f"algorithm.label_smoothing={self.label_smoothing}; set 0 to below 0.5, and 0 with algorithm.ipo"


@dataclass(kw_only=True)
class ReferenceOptions(Options, group="reference"):
    """The reference model, whose log-probabilities are computed once, before training."""

    path: str | None = None
    """A folder or hub name. Default: the model to start from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = self.path and at_home(self.path)


@dataclass(kw_only=True)
class DPOConfig(PairOptions):
    """Make the better responses of pairs likelier than the others, without a reward model."""

    ADAPTERS: ClassVar = ("openrlhf.train_dpo",)
    LEARNS_RESPONSES: ClassVar[bool] = True

    model: ModelOptions = field(default_factory=ModelOptions)
    reference: ReferenceOptions = field(default_factory=ReferenceOptions)
    algorithm: DPOOptions = field(default_factory=DPOOptions)
    train: SupervisedTrainOptions = field(default_factory=lambda: SupervisedTrainOptions(learning_rate=1e-5))

    @property
    def models(self) -> dict[str, str]:
        """See `SupervisedOptions.models`."""
        return super().models | ({"reference.path": self.reference.path} if self.reference.path else {})
