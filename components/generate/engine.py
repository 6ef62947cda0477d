"""Base classes of rollout engines, which sample from a policy.

Legend: `B` sequences, `N` all tokens of the batch end to end, `K` maximum number of new tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from components.batch import Batch
from components.generate.config import SamplingConfig
from components.models.device import peak_gpu_memory
from components.registry import load
from components.weights.verification import OPTION, VERIFICATION

if TYPE_CHECKING:
    from components.weights.publisher import WeightHandle


@dataclass(frozen=True)
class Completions:
    """Completions of B prompts."""

    tokens_BK: Tensor
    """[B, K] int64 token ids. Entries beyond the length of a completion are undefined."""
    logprob_BK: Tensor
    """[B, K] float32 log-probabilities of the sampled tokens, in nats."""
    length_B: Tensor
    """[B] int64 lengths of the completions, end tokens included."""
    ended_B: Tensor
    """[B] bool, True if the completion ended with an end token."""
    per_token: dict[str, Tensor] = field(default_factory=dict)
    """Further columns of prompts and completions, [N] each."""


class WeightVersions(ABC):
    """Version of an engine's weights, and checks of the versions that it may receive."""

    holds_adapters = False
    """True if the engine keeps the weights that it loaded, and receives low-rank adapters that it adds to them."""

    def __init__(self) -> None:
        self._weight_version = 0
        self._damaged = False
        self._asleep = False

    @property
    def weight_version(self) -> int:
        """Version of the weights in use. 0 denotes the weights that were loaded."""
        return self._weight_version

    @property
    def has_weights(self) -> bool:
        """True if the engine has all weights of a version. False after `sleep` has discarded them, and after an error
        in `receive`.
        """
        return not self._damaged

    @abstractmethod
    def _parameters(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return the identity and the shape of each parameter by name. Tied parameters have the same identity."""

    def check_receivable(self, handle: WeightHandle) -> None:
        """Check before copying that a version fits this engine.

        Raises:
            ValueError: the version is older than the one in use; its names or shapes differ from the model's; or it
                contains adapters where the engine takes full weights, or the reverse.
            FileNotFoundError: the version has been unlinked.
        """
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
        # Names and shapes of a version that is being sent are known only at its end. `received` checks them.
        if not handle.is_sent:
            self._check_fit(handle)

    def _check_fit(self, handle: WeightHandle) -> None:
        from components.weights.publisher import weight_shapes

        unfit = adapter_misfit if self.holds_adapters else misfit
        fault = unfit(weight_shapes(handle), self._parameters())
        if fault:
            raise ValueError(
                f"version {handle.version} of the weights at {handle.path} does not fit the engine's model: {fault}; "
                "trainer and engine must load the same architecture (check model paths and tie_word_embeddings)"
            )

    def received(self, handle: WeightHandle, digests: dict[str, str] | None) -> None:
        """Verify the digests of a received version, if there are any, and record that the version is in use.

        Raises:
            ValueError: names or shapes of a version that was sent differ from the model's.
            RuntimeError: a digest differs from the publisher's.
        """
        if handle.is_sent:
            self._check_fit(handle)
        if digests is not None:
            load(VERIFICATION, "compare", OPTION)(handle, digests)
        self._weight_version = handle.version
        self._damaged = False

    @staticmethod
    def _can_free() -> bool:
        """True if the engine uses GPU memory that it could free."""
        return torch.cuda.is_available()

    def _check_ready(self) -> None:
        """Raise an error if the engine cannot generate now.

        Raises:
            ValueError: the engine is asleep, or its weights are incomplete.
        """
        if self._asleep:
            raise ValueError("this engine sleeps; call wake() before anything is generated")
        # Some parameters may be of one version and some of another.
        if self._damaged:
            raise ValueError("the weights of this engine are not those of any version; receive one before you generate")


class RolloutEngine(WeightVersions):
    """Engine that generates completions with its own copy of the weights, which `receive` replaces."""

    positions: int | None = None
    """Maximum number of tokens of prompt and completion together that the model supports. None: no limit."""
    max_tokens: int | None = None
    """Maximum number of tokens of prompt and completion together that the user sets, or None. A completion always has
    at least one token."""

    def generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """Generate one completion for each prompt.

        Args:
            prompts: per token: column `tokens`. Per sequence: `prompt_id` and `sample_id`, int64, which together with
                `sampling.seed` and `.step` determine the random numbers; optionally `max_new_tokens`, int64, the limit
                of each row from 1 to `sampling.max_new_tokens`. All per-sequence and object columns are returned too.
            sampling: sampling parameters.

        Returns:
            Batch in the order of `prompts`. Per token: `tokens` (prompt, completion, end token),
            `action_mask` (True on the completion, end token included), `rollout_logprob` (float32, at the
            sampling temperature, normalized over the tokens that could be sampled; 0 on the prompt). Per sequence:
            `prompt_length`, `truncated` (True without an end token), `weight_version`.
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
        """Generate completions for prompts that have been checked. There may be no prompts."""

    def check(self, probe: Any) -> dict[str, float]:  # noqa: ARG002 - engines with a check override it
        """Compare the engine's log-probabilities with the trainer's (plugins/engine_check), if a check is due.

        An engine requests a check by the metric `check_due`.

        Returns:
            Metrics of the newest check.

        Raises:
            RuntimeError: the engine does not compute what the trainer computes with the same weights.
        """
        return {}

    def metrics(self) -> dict[str, float]:
        """Return metrics of the engine: the peak GPU memory of its first process (the others are alike), and, if it
        measures them, the seconds of the parts of generation since the last call. `check_due` requests a check.
        """
        return peak_gpu_memory()

    def receive(self, handle: WeightHandle, verify: bool = False) -> None:
        """Replace the engine's weights by a published version.

        Args:
            handle: handle of the version.
            verify: compare the digest of each tensor with the publisher's. The version must be published with digests.

        Raises:
            ValueError: the version is older than the one in use, or its names or shapes differ from the model's.
                Nothing has been copied then.
            FileNotFoundError: the version has been unlinked.
            RuntimeError: with `verify`, a received tensor differs from the published one.

        After an error during the copy, the engine generates nothing until it has received a complete version.
        """
        self.check_receivable(handle)
        # If the copy fails, some parameters are of another version, and generation must be refused.
        self._damaged = True
        digests = self._load(handle, verify)
        self.received(handle, digests if verify else None)

    @abstractmethod
    def _load(self, handle: WeightHandle, with_digests: bool) -> dict[str, str]:
        """Copy weights that have been checked. Return the digest of each received tensor by its published name, or an
        empty dict if `with_digests` is False.
        """

    def sleep(self, level: int = 1) -> int:
        """Free the engine's GPU memory until `wake`.

        Args:
            level: 1: keep the weights in host memory. 2: discard them, if the engine supports it; weights must then be
                received before the next generation.

        Returns:
            Number of bytes of GPU memory that were freed. 0 on a CPU, where nothing is freed.
        """
        freed = 0
        if not self._asleep and self._can_free():
            freed = self._sleep(level)
            self._damaged = self._damaged or level == 2
        self._asleep = True
        return freed

    def wake(self, for_weights: bool = False) -> None:
        """Undo `sleep`.

        Args:
            for_weights: restore only what is needed to receive weights. The engine remains asleep otherwise.
        """
        if self._asleep and self._can_free():
            self._wake(for_weights)
        self._asleep = self._asleep and for_weights

    @abstractmethod
    def _sleep(self, level: int) -> int:
        """Move the engine's tensors off the GPU, or discard them. Return the number of bytes freed."""

    @abstractmethod
    def _wake(self, for_weights: bool) -> None:
        """Restore the engine's tensors on the GPU."""

    def close(self) -> None:
        """Stop the engine's threads and processes. It cannot be used afterwards."""

    def _check(self, prompts: Batch, sampling: SamplingConfig) -> None:
        self._check_ready()
        missing = [name for name in ("tokens", "prompt_id", "sample_id") if name not in prompts]
        if missing:
            raise ValueError(
                f"the prompts lack the columns {missing}; every prompt needs `tokens`, and a `prompt_id` and "
                "`sample_id` (int64, per sequence) from which its random numbers are derived"
            )
        # `min` of no lengths would raise an error, and an empty batch is valid: a rank may get no prompts.
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
        """Return the batch of prompts with their completions, as `generate` describes it."""
        lengths_B = prompts.lengths + drawn.length_B
        start_B = lengths_B.cumsum(0) - lengths_B
        total, most = int(lengths_B.sum()), drawn.tokens_BK.shape[1]
        # Positions in the result of all prompt tokens, and of all new tokens row by row.
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
            **drawn.per_token,
        }
        version_B = torch.full((len(prompts),), self._weight_version, dtype=torch.int64)
        added = {"prompt_length": prompts.lengths, "truncated": ~drawn.ended_B, "weight_version": version_B}
        return Batch(lengths_B, per_token, {**prompts.per_sequence, **added}, prompts.objects)


def limits(prompts: Batch, sampling: SamplingConfig) -> Tensor:
    """Return the maximum number of new tokens of each prompt, [B] int64: its column `max_new_tokens`, or that of
    `sampling`.
    """
    if "max_new_tokens" in prompts:
        return prompts["max_new_tokens"]
    return torch.full((len(prompts),), sampling.max_new_tokens)


def misfit(shapes: dict[str, tuple[int, ...]], parameters: dict[str, tuple[int, tuple[int, ...]]]) -> str:
    """Return a message if published weights do not fit the parameters of a model; otherwise an empty string.

    Args:
        shapes: shape of each published weight by name.
        parameters: identity and shape of each parameter by name.
    """
    # Tied embeddings have two names and one identity. The publisher sends one of the names, or both, so a parameter is
    # missing only if neither name of it is present.
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
    """Return a message if adapters do not fit the parameters of a model; otherwise an empty string.

    Args:
        shapes: shape of each adapter matrix by its name in peft's files.
        parameters: identity and shape of each parameter by name.
    """
    faults = []
    for name, shape in sorted(shapes.items()):
        layer, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        _, whole = parameters.get(f"{layer}.weight", (0, ()))
        # For a layer of [out, in], A is [rank, in] and B is [out, rank]: A shares dimension 1 with it, B dimension 0.
        shared = int(side == "A")
        if not (len(whole) == len(shape) == 2 and shape[shared] == whole[shared]):
            faults.append(f"{name} {list(shape)} for a layer of {list(whole) or 'which there is none'}")
    return ", ".join(faults)
