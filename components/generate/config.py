"""Configurations of sampling and of rollout engines, without torch: recipes embed these classes in their own
`config.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from components.ranges import Checked, Count, CountFromZero, NotNegative, OneOf, Positive, ShareAboveZero
from components.train.config import CHOSEN_PRECISIONS, weight_type

EVALUATION_STEP = -1
"""Step number in the counters of evaluation's random numbers: no training step has it, so evaluations always draw the
same numbers, and two of the same weights are equal."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Checked):
    """Sampling of completions. Tokens depend on these fields, the prompt and its ids, and on nothing else."""

    temperature: NotNegative = 1.0
    """Logits are divided by it. 0 = the likeliest token, with its log-probability at temperature 1."""
    top_p: ShareAboveZero = 1.0
    """Draw from the likeliest tokens whose probabilities reach this sum; 1 = from all."""
    top_k: CountFromZero = 0
    """Draw from so many likeliest tokens; 0 = from all. With top_p or top_k log-probabilities are those of the tokens
    that are left, which is not what a trainer computes."""
    max_new_tokens: Count = 16
    """Completions are cut after so many tokens, the end token included."""
    seed: int = 42
    """The run's seed."""
    step: int = 0
    """The generation step; another step draws other numbers for the same prompt."""

    @property
    def is_whole(self) -> bool:
        """True if every token can be drawn, so that log-probabilities are the trainer's."""
        return self.temperature == 0 or (self.top_p == 1 and self.top_k == 0)


@dataclass(frozen=True, kw_only=True)
class RolloutSetting:
    """Facts of a run from which an engine's configuration is made, besides the options of the group `rollout`."""

    precision: str
    """Precision that the policy is trained in."""
    max_prompt_tokens: int | None
    """Maximum number of tokens of a prompt. None: as many as the model has positions for."""
    shares_devices: bool
    """Other roles use the engine's devices."""
    learners_sleep: bool
    """Learners free the memory of the devices while responses are generated."""
    engines_sleep: bool
    """The engine leaves its devices while others work."""
    lora_rank: int
    """Rank of the adapters that the engine receives in place of whole weights. 0: it receives whole weights."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Checked):
    """Configuration of one rollout engine, and the facts about that engine by which a run chooses it.

    A plug-in that provides the `rollout engine` NAME provides a subclass as the `rollout config` NAME. Its module does
    not import torch.
    """

    NAME: ClassVar[str] = ""
    """Name of the engine, as `rollout.engine` takes it."""
    TITLE: ClassVar[str] = ""
    """Name of the library in messages."""
    PACKAGE: ClassVar[str] = ""
    """Import name of the library that the engine needs. Empty: none."""
    INSTALL: ClassVar[str] = ""
    """Command that installs the library."""

    max_num_seqs: Count = 512
    """Maximum number of sequences generated at the same time; others wait. Changes memory and speed, not tokens."""
    lora_rank: CountFromZero = 0
    """Keep the weights as they were loaded, and receive low-rank adapters of this rank that are added to them. 0:
    receive whole weights."""

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
            model_path: folder, hub name, or the name of a demonstration model that is still to be made.
            temperatures: sampling temperatures of the run.
        """
        return ""

    @classmethod
    def advantage(cls, gpus: int, model_path: str) -> str:  # noqa: ARG003
        """Return why `rollout.engine=auto` selects this engine; empty if it does not."""
        return ""

    @classmethod
    def adapters_fault(cls, model_path: str, lora_rank: int, is_requested: bool) -> str:  # noqa: ARG003
        """Return why adapters must be added to the weights before the engine receives these; empty if it adds them.

        Args:
            model_path: as for `fault`.
            lora_rank: rank of the adapters.
            is_requested: the user says that the engine can, which is believed of a model that is not here yet.
        """
        return f"{cls.NAME} holds whole weights"


@dataclass(frozen=True, kw_only=True)
class HFRolloutConfig(RolloutConfig):
    """The generation loop over a transformers model."""

    NAME: ClassVar[str] = "hf"

    precision: Annotated[str, OneOf(CHOSEN_PRECISIONS)] = "fp32"
    """"fp32", "bf16" or "bf16_autocast", as of the policy that is trained. Log-probabilities are float32 always."""

    @property
    def weights_dtype(self) -> str:
        return weight_type(self.precision)

    @classmethod
    def from_options(cls, options: Any, setting: RolloutSetting) -> Self:
        return cls(precision=setting.precision, max_num_seqs=options.max_num_seqs)


@dataclass(frozen=True, kw_only=True)
class PagedRolloutConfig(RolloutConfig):
    """An engine that takes a share of its devices' memory at its start, for weights and a paged key-value cache."""

    dtype: Annotated[str, OneOf(("float32", "bfloat16"))] = "float32"
    """Dtype of weights and cache: "float32" or "bfloat16". Log-probabilities are float32 in either case."""
    max_num_seqs: Count = 256
    tensor_parallel_size: Count = 1
    """Devices over which the weights of one engine are spread; on a CPU processes, each with a core of its own."""
    gpu_memory_utilization: ShareAboveZero = 0.9
    """Share of a GPU's memory that weights and cache may take. Unused on a CPU."""
    cpu_cache_gb: Positive = 1.0
    """GiB of an engine's key-value cache on a CPU. Unused on a GPU."""
    enforce_eager: bool = False
    """On a GPU, run kernels one by one instead of in CUDA graphs: slower, and starts sooner. On a CPU always."""
    enable_sleep: bool = False
    """On a GPU, be able to give its memory back between generations. On a CPU nothing is freed."""
    own_process: bool = False
    """Run the engine in a process beside this one; otherwise in this one, where a single device allows it."""

    @property
    def weights_dtype(self) -> str:
        return self.dtype
