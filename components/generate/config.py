"""Configurations of sampling and of rollout engines, without torch: recipes embed these classes in their own
`config.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from components.ranges import Checked, Count, CountFromZero, NotNegative, OneOf, ShareAboveZero
from components.train.config import CHOSEN_PRECISIONS, weight_type

EVALUATION_STEP = -1
"""Step number from which the random numbers of evaluations are derived. No training step has it, so every evaluation
uses the same random numbers, and two evaluations of the same weights give equal results."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Checked):
    """Sampling parameters of completions. The sampled tokens depend only on these fields, the prompt and its ids."""

    temperature: NotNegative = 1.0
    """Sampling temperature, by which logits are divided. 0 selects the most likely token, with its log-probability at
    temperature 1."""
    top_p: ShareAboveZero = 1.0
    """Top-p: sample from the smallest set of most likely tokens whose probabilities sum to at least this. 1 samples
    from the full vocabulary."""
    top_k: CountFromZero = 0
    """Top-k: number of most likely tokens to sample from. 0 samples from the full vocabulary. With top_p or top_k
    log-probabilities are normalized over the remaining tokens, so they differ from those that a trainer computes."""
    max_new_tokens: Count = 16
    """Maximum number of tokens of a completion, the end token included. Longer completions are truncated."""
    seed: int = 42
    """Seed of the run."""
    step: int = 0
    """Generation step. Different steps use different random numbers for the same prompt."""

    @property
    def is_full_vocabulary(self) -> bool:
        """True if every token of the vocabulary can be sampled, so that log-probabilities agree with the trainer's."""
        return self.temperature == 0 or (self.top_p == 1 and self.top_k == 0)


@dataclass(frozen=True, kw_only=True)
class RolloutSetting:
    """Facts of a run from which an engine's configuration is made, besides the options of the group `rollout`."""

    precision: str
    """Precision that the policy is trained in."""
    max_prompt_tokens: int | None
    """Maximum number of tokens of a prompt. None: limited by the model's number of positions."""
    shares_devices: bool
    """True if other roles use the engine's devices."""
    learners_sleep: bool
    """True if learners free their device memory while responses are generated."""
    engines_sleep: bool
    """True if the engine frees its device memory while other roles compute."""
    lora_rank: int
    """Rank of the adapters that the engine receives instead of the full weights. 0: it receives the full weights."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Checked):
    """Configuration of one rollout engine, and the properties of that engine by which a run chooses it.

    A plug-in that provides the `rollout engine` NAME provides a subclass as the `rollout config` NAME. Its module does
    not import torch.
    """

    NAME: ClassVar[str] = ""
    """Name of the engine, a value of `rollout.engine`."""
    TITLE: ClassVar[str] = ""
    """Name of the library in messages."""
    PACKAGE: ClassVar[str] = ""
    """Import name of the library that the engine needs, or empty."""
    INSTALL: ClassVar[str] = ""
    """Command that installs the library."""

    max_num_seqs: Count = 512
    """Maximum number of sequences generated at the same time; the others are queued. Changes memory and speed, not the
    tokens."""
    lora_rank: CountFromZero = 0
    """Rank of the low-rank adapters that the engine receives and adds to the weights that it loaded. 0: it receives the
    full weights."""

    @property
    def weights_dtype(self) -> str:
        """Name of the dtype of the weights that the engine receives."""
        raise NotImplementedError

    @classmethod
    def from_options(cls, options: Any, setting: RolloutSetting) -> Self:
        """Make the configuration from the options of the group `rollout`."""
        raise NotImplementedError

    @classmethod
    def fault(cls, gpus: int, model_path: str, temperatures: tuple[float, ...]) -> str:  # noqa: ARG003
        """Return why the engine cannot sample from a model; empty if it can.

        Args:
            gpus: number of GPUs of a machine.
            model_path: folder, hub name, or name of a demonstration model that has not been created yet.
            temperatures: sampling temperatures of the run.
        """
        return ""

    @classmethod
    def advantage(cls, gpus: int, model_path: str) -> str:  # noqa: ARG003
        """Return why `rollout.engine=auto` selects this engine; empty if it does not."""
        return ""

    @classmethod
    def adapters_fault(cls, model_path: str, lora_rank: int, is_requested: bool) -> str:  # noqa: ARG003
        """Return why adapters must be merged into the weights before the engine receives them. Empty: the engine takes
        adapters.

        Args:
            model_path: as for `fault`.
            lora_rank: rank of the adapters.
            is_requested: the user states that the engine can. This is accepted for a model that is not on this machine
                yet.
        """
        return f"{cls.NAME} holds whole weights"


@dataclass(frozen=True, kw_only=True)
class HFRolloutConfig(RolloutConfig):
    """Configuration of the engine `hf`, a generation loop over a transformers model."""

    NAME: ClassVar[str] = "hf"

    precision: Annotated[str, OneOf(CHOSEN_PRECISIONS)] = "fp32"
    """Precision: "fp32", "bf16" or "bf16_autocast", as for the policy that is trained. Log-probabilities are always
    float32."""

    @property
    def weights_dtype(self) -> str:
        return weight_type(self.precision)

    @classmethod
    def from_options(cls, options: Any, setting: RolloutSetting) -> Self:
        return cls(precision=setting.precision, max_num_seqs=options.max_num_seqs or cls.max_num_seqs)
