"""Generation request by request, for callers that each wait for their own: agents, and rollouts that continue while
weights change. Everything here runs in one asyncio loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from components.generate.config import SamplingConfig
from components.generate.engine import WeightVersions

if TYPE_CHECKING:
    from components.weights.publisher import WeightHandle

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Piece:
    """Tokens that came together."""

    tokens: list[int]
    logprobs: list[float]
    """In nats, one per token."""


@dataclass(frozen=True)
class Generation:
    """All that was drawn for one request."""

    tokens: list[int]
    logprobs: list[float]
    """In nats, one per token, at the sampling temperature."""
    versions: list[int]
    """Version of the weights that drew each token."""
    finish: Finish
    """An end token came, the limit was reached, or the request was aborted."""


class Request(ABC):
    """A request on its way: iterate over its pieces as they come, or wait for all of it."""

    @abstractmethod
    def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces that were not yet taken; for one reader.

        Raises:
            what `result` raises.
        """

    @abstractmethod
    async def result(self) -> Generation:
        """Everything, once it is finished or aborted.

        Raises:
            RuntimeError: the engine has died, or was closed.
            ValueError, RuntimeError: what the engine raises for this request and those that it drew together with it.
        """

    @abstractmethod
    async def abort(self) -> Generation:
        """End it; returns what was drawn so far."""


class AsyncEngine(WeightVersions):
    """Draws completions for many callers at the same time."""

    positions: int | None = None
    """Tokens of prompt and completion together, at most; None: any number."""

    def __init__(self) -> None:
        super().__init__()
        self._updating = asyncio.Lock()
        """Held while weights come in."""

    @abstractmethod
    def submit(
        self, tokens: Sequence[int], sampling: SamplingConfig, *, prompt_id: int = 0, sample_id: int = 0
    ) -> Request:
        """Continue `tokens`; returns at once.

        Args:
            tokens: ids of the prompt, at least one.
            sampling: how to draw.
            prompt_id: with `sample_id`, `sampling.seed`, `sampling.step` and the length of the prompt it fixes the
                random numbers, whatever else is generated.
            sample_id: which of the prompt's samples.

        Raises:
            ValueError: the prompt is empty, or too long for what is to be drawn; or weights have not arrived whole.
        """

    def _check_request(self, tokens: Sequence[int], sampling: SamplingConfig) -> None:
        # Requests that come while weights do wait for them.
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
        """Start nothing more until `resume`; returns once nothing is being drawn. Requests wait, new ones too."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue after `pause`."""

    @abstractmethod
    async def receive(self, handle: WeightHandle, verify: bool = False) -> None:
        """Copy published weights over the engine's own while requests wait, which then continue.

        Raises:
            ValueError, FileNotFoundError, RuntimeError: as `RolloutEngine.receive`. After an error in the middle of the
                copying the engine stays paused, until a version has arrived whole.
        """

    @abstractmethod
    async def gpu_memory(self) -> dict[str, float]:
        """See `RolloutEngine.gpu_memory`."""

    @abstractmethod
    async def sleep(self, level: int = 1) -> int:
        """Free the accelerator's memory until `wake`, see `RolloutEngine.sleep`. Requests in flight are aborted."""

    @abstractmethod
    async def wake(self, for_weights: bool = False) -> None:
        """Undo `sleep`, see `RolloutEngine.wake`."""

    @abstractmethod
    def close(self) -> None:
        """End what the engine has started."""
