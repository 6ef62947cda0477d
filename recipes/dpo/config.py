"""The options of this recipe, beside those that recipes on pairs share; `--help` prints them all.

`--flag value` and `flag=value` mean the same; `--config FILE` reads YAML. The names are those of OpenRLHF's train_dpo.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from components.engines.config import TrainConfig
from training.options import new_run_dir
from training.schema import ConfigError
from training.supervised_flags import refused
from training.supervised_options import PairOptions

RECIPE = Path(__file__).parent.name
OWN_NAMES = {
    "ref.model_name_or_path": "ref_pretrain",
    "model.beta": "beta",
    "model.ipo_enable": "ipo",
    "model.label_smoothing": "label_smoothing",
    "model.nll_loss_coef": "nll_loss_coef",
    "ds.lora.rank": "lora_rank",
    "ds.lora.alpha": "lora_alpha",
    "ds.lora.dropout": "lora_dropout",
    "ds.lora.target_modules": "target_modules",
}
"""The name since OpenRLHF 0.10 -> the name here."""


@dataclass(kw_only=True)
class DPOConfig(PairOptions):
    """Make the better responses of pairs likelier than the others, without a reward model."""

    ALIASES: ClassVar[Mapping[str, str]] = {**PairOptions.ALIASES, **OWN_NAMES}
    REFUSED: ClassVar[Mapping[str, Any]] = {
        **PairOptions.REFUSED,
        **refused("ref_offload ref.offload", "the reference has left before training begins", harmless="true"),
    }
    PATHS: ClassVar[tuple[str, ...]] = (*PairOptions.PATHS, "ref_pretrain")

    run_dir: str = field(default_factory=lambda: new_run_dir(RECIPE))
    """Folder of everything that the run writes."""
    ref_pretrain: str | None = None
    """The reference model; asked once, before training. Default: the model to start from."""
    beta: float = 0.1
    """Weight of the KL to the reference model in what is optimised."""
    label_smoothing: float = 0.0
    """Share of the labels taken to be wrong (conservative DPO)."""
    ipo: bool = False
    """The squared loss of IPO instead of the logistic one."""
    nll_loss_coef: float = 0.0
    """Weight of the chosen responses' own negative log-likelihood, per token of a response."""
    learning_rate: float = 1e-5
    """Peak learning rate."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank (peft) instead of the weights. 0: train all."""
    lora_alpha: float = 16.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Share of an adapter's inputs that is dropped in training."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Layers that get an adapter: their names or endings, or all-linear."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0:
            raise ConfigError(f"beta={self.beta}; set it above 0")
        if not 0 <= self.label_smoothing < 0.5 or (self.label_smoothing and self.ipo):
            raise ConfigError(f"label_smoothing={self.label_smoothing}; set 0 to below 0.5, and 0 with ipo")
        if self.nll_loss_coef < 0:
            raise ConfigError(f"nll_loss_coef={self.nll_loss_coef}; set it to 0 or more")

    @property
    def models(self) -> dict[str, str]:
        """See `SupervisedOptions.models`."""
        return super().models | ({"ref_pretrain": self.ref_pretrain} if self.ref_pretrain else {})

    def engine(self, total_steps: int, has_gpu: bool) -> TrainConfig:
        """See `SupervisedOptions.engine`."""
        return replace(
            super().engine(total_steps, has_gpu),
            lora_rank=self.lora_rank,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            lora_target_modules=",".join(self.target_modules),
        )
