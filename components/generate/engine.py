"""Engines that sample from a policy, whichever library generates: what every one of them does, and how one is opened.

Legend: `B` sequences, `N` all tokens of the batch end to end, `K` most new tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from components.batch import Batch
from components.generate.config import SamplingConfig
from components.models.device import peak_gpu_memory

if TYPE_CHECKING:
    from components.weights.publisher import WeightHandle


@dataclass(frozen=True)
class Completions:
    """What was drawn for B prompts."""

    tokens_BK: Tensor
    """int64; what is beyond a completion's length means nothing."""
    logprob_BK: Tensor
    """float32, of the tokens drawn."""
    length_B: Tensor
    """int64, the end token included."""
    ended_B: Tensor
    """bool: an end token came."""


class WeightVersions(ABC):
    """Which weights an engine has, and which it may be given."""

    holds_adapters = False
    """It keeps the weights that it loaded, and is given low-rank adapters, which it adds to them."""

    def __init__(self) -> None:
        self._weight_version = 0
        self._sent: tuple[int, dict[str, str]] | None = None
        self._damaged = False
        self._asleep = False

    @property
    def weight_version(self) -> int:
        """Version of the weights in use; 0 = as loaded."""
        return self._weight_version

    @property
    def has_weights(self) -> bool:
        """Whether it has all weights of a version; not after `sleep` has dropped them, or an error of `receive`."""
        return not self._damaged

    def sent_digests(self, handle: WeightHandle) -> dict[str, str] | None:
        """Of a version that the ranks have sent, and whose own handle comes now; None: it is not here yet."""
        if self._sent is None or self._sent[0] != handle.version or self._damaged or handle.is_sent:
            return None
        return self._sent[1]

    @abstractmethod
    def _parameters(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Of every name that a parameter has: which parameter it is (tied ones are the same), and its shape."""

    def check_receivable(self, handle: WeightHandle) -> None:
        """See that a version fits, before anything is copied.

        Raises:
            ValueError: it is older than the one in use, has names or shapes that are not this model's, or is adapters
                where weights are wanted, or the reverse.
            FileNotFoundError: it is gone.
        """
        from components.weights.publisher import weight_shapes

        if handle.version < self._weight_version:
            raise ValueError(
                f"version {handle.version} of the weights is older than version {self._weight_version}, "
                "which this engine already uses; publish rising versions and receive the newest"
            )
        if bool(handle.adapter_scale) != self.holds_adapters:
            kinds = ("weights", "adapters") if self.holds_adapters else ("adapters", "weights")
            raise ValueError(
                f"version {handle.version} is {kinds[0]}, and this engine takes {kinds[1]}; make it with the lora_rank "
                "of the trainer for adapters, and without for weights"
            )
        if handle.is_sent:
            return  # names and shapes come with the weights, and are looked at with the version's own handle
        unfit = adapter_misfit if self.holds_adapters else misfit
        fault = unfit(weight_shapes(handle), self._parameters())
        if fault:
            raise ValueError(
                f"version {handle.version} of the weights at {handle.path} does not fit the engine's model: {fault}; "
                "trainer and engine must load the same architecture (check model paths and tie_word_embeddings)"
            )

    def received(self, handle: WeightHandle, digests: dict[str, str] | None) -> None:
        """Note that a version is in use, once its digests, where there are some, are the publisher's.

        Raises:
            RuntimeError: they are not.
        """
        if handle.is_sent:
            self._sent = handle.version, digests or {}
        elif digests is not None:
            from components.weights.digest import compare_digests
            from components.weights.publisher import read_digests

            faults = compare_digests(read_digests(handle), digests)
            if faults:
                raise RuntimeError(f"version {handle.version} of the weights arrived damaged: {', '.join(faults)}")
        self._weight_version = handle.version
        self._damaged = False

    @staticmethod
    def _can_free() -> bool:
        """Whether there is memory of a GPU to be given back."""
        return torch.cuda.is_available()

    def _check_ready(self) -> None:
        """See that something can be drawn."""
        if self._asleep:
            raise ValueError("this engine sleeps; call wake() before anything is generated")
        if self._damaged:
            raise ValueError("the weights of this engine are not those of any version; receive one before you generate")


class RolloutEngine(WeightVersions):
    """Draws completions; holds its own copy of the weights, replaced by `receive`."""

    positions: int | None = None
    """Tokens of prompt and completion together, at most; None: any number."""
    max_tokens: int | None = None
    """Maximum number of tokens of prompt and completion together that the user sets, or None. A completion has at least
    one token."""

    def generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """Draw one completion for each prompt.

        Args:
            prompts: column `tokens`; per sequence `prompt_id` and `sample_id`, int64, which together with
                `sampling.seed` and `.step` fix the random numbers; perhaps `max_new_tokens`, int64, each row's own
                limit, 1 to `sampling.max_new_tokens`. All per-sequence and object columns are carried through.
            sampling: how to draw.

        Returns:
            Batch in the order of `prompts`. Per token: `tokens` (prompt, completion, end token),
            `action_mask` (True on the completion, end token included), `rollout_logprob` (float32, at the
            sampling temperature, among the tokens that could be drawn; 0 on the prompt). Per sequence: `prompt_length`,
            `truncated` (no end token came), `weight_version`.
        """
        if self.max_tokens is None:
            return self._generate(prompts, sampling)
        limit_B = (self.max_tokens - prompts.lengths).clamp(min=1).minimum(limits(prompts, sampling))
        return self._generate(prompts.with_sequences(max_new_tokens=limit_B), sampling).without("max_new_tokens")

    def _generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        self._check(prompts, sampling)
        return self._assemble(prompts, self._complete(prompts, sampling))

    @abstractmethod
    def _complete(self, prompts: Batch, sampling: SamplingConfig) -> Completions:
        """Draw for prompts that have been checked; there may be none."""

    def gpu_memory(self) -> dict[str, float]:
        """See `peak_gpu_memory`; of the first of its processes, which are alike."""
        return peak_gpu_memory()

    def receive(self, handle: WeightHandle, verify: bool = False) -> None:
        """Copy published weights over the engine's own.

        Args:
            handle: of the version.
            verify: compare each tensor's digest with the publisher's, which must have made them.

        Raises:
            ValueError: an older version than the one in use, or names or shapes that are not this model's; nothing was
                copied then.
            FileNotFoundError: the version is gone.
            RuntimeError: with `verify`, something else has arrived than was published.

        After an error in the middle of the copying nothing is generated until a version has arrived whole.
        """
        self.check_receivable(handle)
        digests = self.sent_digests(handle)
        if digests is None:
            self._damaged = True
            digests = self._load(handle, verify)
        self.received(handle, digests if verify else None)

    @abstractmethod
    def _load(self, handle: WeightHandle, with_digests: bool) -> dict[str, str]:
        """Take over weights that fit; with digests: those of what has arrived, by published name."""

    def sleep(self, level: int = 1) -> int:
        """Free the accelerator's memory until `wake`.

        Args:
            level: 1: the weights wait in host memory; 2: they are dropped, where the engine can, and have to be
                received again before anything is generated.

        Returns:
            Bytes of GPU memory that were given back. 0 on a CPU, where nothing is freed.
        """
        if self._asleep or not self._can_free():
            self._asleep = True
            return 0
        freed = self._sleep(level)
        self._asleep, self._damaged = True, self._damaged or level == 2
        return freed

    def wake(self, for_weights: bool = False) -> None:
        """Undo `sleep`.

        Args:
            for_weights: only as far as weights can be received; the engine continues sleeping otherwise.
        """
        if self._asleep and self._can_free():
            self._wake(for_weights)
        self._asleep = self._asleep and for_weights

    @abstractmethod
    def _sleep(self, level: int) -> int:
        """Move or drop what is on the GPU; returns how many bytes."""

    @abstractmethod
    def _wake(self, for_weights: bool) -> None:
        """Bring it back."""

    def close(self) -> None:
        """End what the engine has started; it cannot be used afterwards."""

    def _check(self, prompts: Batch, sampling: SamplingConfig) -> None:
        self._check_ready()
        missing = [name for name in ("tokens", "prompt_id", "sample_id") if name not in prompts]
        if missing:
            raise ValueError(
                f"the prompts lack the columns {missing}; every prompt needs `tokens`, and a `prompt_id` and "
                "`sample_id` (int64, per sequence) from which its random numbers are derived"
            )
        if not len(prompts):
            return
        if int(prompts.lengths.min()) == 0:
            row = int(prompts.lengths.argmin())
            raise ValueError(f"prompt {row} has no tokens; begin it with one, such as the start token")
        limit_B = limits(prompts, sampling)
        if int(limit_B.min()) < 1 or int(limit_B.max()) > sampling.max_new_tokens:
            raise ValueError(
                f"the column `max_new_tokens` holds {int(limit_B.min())} to {int(limit_B.max())}; every row's own "
                f"limit has to be between 1 and the sampling's max_new_tokens={sampling.max_new_tokens}"
            )
        longest_B = prompts.lengths + limit_B
        if self.positions is not None and int(longest_B.max()) > self.positions:
            row = int(longest_B.argmax())
            raise ValueError(
                f"prompt {row} has {int(prompts.lengths[row])} tokens; with max_new_tokens={int(limit_B[row])} that "
                f"exceeds the model's {self.positions} positions; lower one of the two"
            )

    def _assemble(self, prompts: Batch, drawn: Completions) -> Batch:
        """Put prompts and completions together."""
        lengths_B = prompts.lengths + drawn.length_B
        start_B = lengths_B.cumsum(0) - lengths_B
        total, most = int(lengths_B.sum()), drawn.tokens_BK.shape[1]
        # Where each prompt token, and each new token (row by row), goes in the result.
        prompt_N = torch.arange(prompts.num_tokens) + (start_B - prompts.offsets[:-1])[prompts.sequence_ids]
        inside_BK = torch.arange(most) < drawn.length_B[:, None]
        new_N = ((start_B + prompts.lengths)[:, None] + torch.arange(most))[inside_BK]
        tokens_N = torch.zeros(total, dtype=torch.int64)
        tokens_N[prompt_N] = prompts["tokens"].to(torch.int64)
        tokens_N[new_N] = drawn.tokens_BK[inside_BK]
        per_token = {
            "tokens": tokens_N,
            "action_mask": torch.zeros(total, dtype=torch.bool).index_fill_(0, new_N, True),
            "rollout_logprob": torch.zeros(total).index_copy_(0, new_N, drawn.logprob_BK[inside_BK]),
        }
        version_B = torch.full((len(prompts),), self._weight_version, dtype=torch.int64)
        own = {"prompt_length": prompts.lengths, "truncated": ~drawn.ended_B, "weight_version": version_B}
        return Batch(lengths_B, per_token, {**prompts.per_sequence, **own}, prompts.objects)


def limits(prompts: Batch, sampling: SamplingConfig) -> Tensor:
    """[B] int64, how many tokens each prompt may be given: its own `max_new_tokens`, or that of the sampling."""
    if "max_new_tokens" in prompts:
        return prompts["max_new_tokens"]
    return torch.full((len(prompts),), sampling.max_new_tokens)


def misfit(shapes: dict[str, tuple[int, ...]], parameters: dict[str, tuple[int, tuple[int, ...]]]) -> str:
    """What is wrong with weights of these names and shapes for a model of these parameters; empty when nothing is."""
    # With tied embeddings two names lead to one parameter, and the publisher sends one of them, or both.
    present = {parameters[name][0] for name in shapes.keys() & parameters.keys()}
    missing = sorted(name for name, (identity, _) in parameters.items() if identity not in present)
    unknown = sorted(shapes.keys() - parameters.keys())
    misshapen = [
        f"{name} {list(shape)} instead of {list(parameters[name][1])}"
        for name, shape in sorted(shapes.items())
        if name in parameters and shape != parameters[name][1]
    ]
    if not (missing or unknown or misshapen):
        return ""
    return f"missing {missing or 'nothing'}, unknown {unknown or 'nothing'}, of another shape {misshapen or 'nothing'}"


def adapter_misfit(shapes: dict[str, tuple[int, ...]], parameters: dict[str, tuple[int, tuple[int, ...]]]) -> str:
    """What is wrong with adapters, by the names of peft's files, for a model of these parameters; empty when nothing
    is.
    """
    faults = []
    for name, shape in sorted(shapes.items()):
        layer, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        _, whole = parameters.get(f"{layer}.weight", (0, ()))
        # A is [rank, in] and B is [out, rank] for a layer of [out, in].
        fits = len(whole) == len(shape) == 2 and (shape[1] == whole[1] if side == "A" else shape[0] == whole[0])
        if not fits:
            faults.append(f"{name} {list(shape)} for a layer of {list(whole) or 'which there is none'}")
    return ", ".join(faults)
