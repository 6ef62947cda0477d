"""Interface of engines that generate single requests, each with a caller that awaits it.

Agents use them, and rollouts that continue while weights are updated. Everything runs in one asyncio loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from components.generate.config import SamplingConfig
from components.generate.engine import WeightVersions

if TYPE_CHECKING:
    from components.weights.publisher import WeightHandle

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Piece:
    """Tokens of a request that arrived together."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probability of each token, in nats."""


@dataclass(frozen=True)
class Generation:
    """Complete result of one request."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probability of each token in nats, at the sampling temperature."""
    versions: list[int]
    """Version of the weights with which each token was sampled."""
    finish: Finish
    """Reason for the end: "stop" for an end token, "length" for the token limit, "abort" for an aborted request."""


class Request(ABC):
    """A request in progress. Iterate over it to receive its pieces as they are generated, or await `result`."""

    @abstractmethod
    def __aiter__(self) -> AsyncIterator[Piece]:
        """Iterate over the pieces that have not been consumed yet. Supports a single consumer.

        Raises:
            RuntimeError, ValueError: as `result`.
        """

    @abstractmethod
    async def result(self) -> Generation:
        """Wait until the request is finished or aborted, and return all its tokens.

        Raises:
            RuntimeError: the engine has died or was closed.
            ValueError, RuntimeError: error of the engine for this request or for one in the same batch.
        """

    @abstractmethod
    async def abort(self) -> Generation:
        """Abort the request. Return the tokens that have been generated so far."""


class AsyncEngine(WeightVersions):
    """Rollout engine that generates completions for many callers at the same time."""

    positions: int | None = None
    """Maximum number of tokens of prompt and completion together. None: no limit."""

    def __init__(self) -> None:
        super().__init__()
        self._updating = asyncio.Lock()
        """Lock that is held while weights are received."""

    @abstractmethod
    def submit(
        self, tokens: Sequence[int], sampling: SamplingConfig, *, prompt_id: int = 0, sample_id: int = 0
    ) -> Request:
        """Submit a request that continues `tokens`, and return it at once.

        Args:
            tokens: token ids of the prompt, at least one.
            sampling: sampling parameters.
            prompt_id: id of the prompt. Together with `sample_id`, `sampling.seed`, `sampling.step` and the length of
                the prompt it determines the random numbers, independently of other requests.
            sample_id: index of the sample among those of the prompt.

        Raises:
            ValueError: the prompt is empty or too long for `sampling.max_new_tokens`, or the engine has no complete
                weights.
        """

    def _check_request(self, tokens: Sequence[int], sampling: SamplingConfig) -> None:
        # A request that arrives while weights are received waits for them. Checking now would refuse it.
        if not self._updating.locked():
            self._check_ready()
        space = self.positions
        if not tokens or (space is not None and len(tokens) + sampling.max_new_tokens > space):
            raise ValueError(
                f"a prompt of {len(tokens)} tokens with max_new_tokens={sampling.max_new_tokens}; it needs at least "
                f"one token, and both together at most {space}"
            )

    @abstractmethod
    async def pause(self) -> None:
        """Pause generation: return once no request is running. Queued and new requests wait for `resume`."""

    @abstractmethod
    async def resume(self) -> None:
        """Resume generation after `pause`."""

    @abstractmethod
    async def receive(self, handle: WeightHandle, verify: bool = False) -> None:
        """Replace the engine's weights by a published version. Requests are paused meanwhile, and continue afterwards.

        Raises:
            ValueError, FileNotFoundError, RuntimeError: as `RolloutEngine.receive`. After an error during the copy the
                engine remains paused until it has received a complete version.
        """

    async def check(self, probe: Any) -> dict[str, float]:  # noqa: ARG002 - as in `RolloutEngine`
        """Compare the engine's log-probabilities with the trainer's, if a check is due; see `RolloutEngine.check`."""
        return {}

    @abstractmethod
    async def metrics(self) -> dict[str, float]:
        """See `RolloutEngine.metrics`."""

    @abstractmethod
    async def sleep(self, level: int = 1) -> int:
        """Free the GPU memory until `wake`; see `RolloutEngine.sleep`. Requests in flight are aborted."""

    @abstractmethod
    async def wake(self, for_weights: bool = False) -> None:
        """Undo `sleep`; see `RolloutEngine.wake`."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engine's threads and processes."""
