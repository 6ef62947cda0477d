"""Requests over an engine that draws whole batches: what waits is drawn together, and what comes meanwhile goes next.

The engine works in one thread of its own, so that the loop continues.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from components.batch import Batch
from components.generate.async_engine import AsyncEngine, Generation, Piece, Request
from components.generate.config import SamplingConfig

if TYPE_CHECKING:
    from components.generate.engine import RolloutEngine
    from components.weights.publisher import WeightHandle

T = TypeVar("T")
_QUIET_TURNS = 32
"""Turns of the loop without a new request before a batch starts. Callers that wait for nothing but each other and
tasks of their own have all asked by then, so their batches are the same in every run."""


class BatchedRequest(Request):
    """A request whose tokens all come in one piece."""

    def __init__(
        self, engine: BatchedEngine, tokens: Sequence[int], sampling: SamplingConfig, prompt_id: int, sample_id: int
    ) -> None:
        self.tokens, self.sampling = list(tokens), sampling
        self.prompt_id, self.sample_id = prompt_id, sample_id
        self._engine = engine
        self._aborted = self._taken = False
        # Not a future, which a caller that stops waiting would cancel; to shield it costs more than all the rest.
        self._finished = asyncio.Event()
        self._drawn: Generation | None = None
        self._error: Exception | None = None
        self._trace: TracebackType | None = None

    async def __aiter__(self) -> AsyncIterator[Piece]:
        drawn = await self.result()
        if drawn.tokens and not self._taken:
            self._taken = True
            yield Piece(drawn.tokens, drawn.logprobs)

    async def result(self) -> Generation:
        await self._finished.wait()
        if self._error is not None:
            # The trace as it came, not with those of others who have raised the same error.
            raise self._error.with_traceback(self._trace)
        assert self._drawn is not None
        return self._drawn

    async def abort(self) -> Generation:
        """End it. One that waits has nothing; one that is being drawn has what it is given with its batch."""
        self._aborted = True
        if self._engine.withdraw(self):
            self.finish(Generation([], [], [], "abort"))
        return await self.result()

    def finish(self, drawn: Generation | Exception) -> None:
        """Hand the result, or what went wrong, to whoever waits."""
        if isinstance(drawn, Exception):
            self._error, self._trace = drawn, drawn.__traceback__
        else:
            self._drawn = dataclasses.replace(drawn, finish="abort") if self._aborted else drawn
        self._finished.set()


class BatchedEngine(AsyncEngine):
    """Any `RolloutEngine`, which must not be used otherwise while requests are under way."""

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__()
        self.engine = engine
        self.positions = engine.positions
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generate")
        # In the order in which they came; the values mean nothing.
        self._waiting: dict[BatchedRequest, None] = {}
        self._submitted = 0
        self._driver: asyncio.Task[None] | None = None
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    @property
    def weight_version(self) -> int:
        """Version of the weights in use; 0 = as loaded."""
        return self.engine.weight_version

    @property
    def has_weights(self) -> bool:
        """See `WeightVersions.has_weights`."""
        return self.engine.has_weights

    def submit(
        self, tokens: Sequence[int], sampling: SamplingConfig, *, prompt_id: int = 0, sample_id: int = 0
    ) -> BatchedRequest:
        self._check_request(tokens, sampling)
        request = BatchedRequest(self, tokens, sampling, prompt_id, sample_id)
        self._waiting[request] = None
        self._submitted += 1
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive(), name="generate")
        return request

    def withdraw(self, request: BatchedRequest) -> bool:
        """Whether it still waited; it does no longer."""
        if request not in self._waiting:
            return False
        del self._waiting[request]
        return True

    async def pause(self) -> None:
        self._open.clear()
        await self._idle.wait()

    async def resume(self) -> None:
        self._open.set()

    async def receive(self, handle: WeightHandle, verify: bool = False) -> None:
        async with self._updating:
            self.engine.check_receivable(handle)
            await self.pause()
            await self._in_thread(self.engine.receive, handle, verify)
            await self.resume()

    async def gpu_memory(self) -> dict[str, float]:
        return self.engine.gpu_memory()

    async def sleep(self, level: int = 1) -> int:
        return await self._in_thread(self.engine.sleep, level)

    async def wake(self, for_weights: bool = False) -> None:
        await self._in_thread(self.engine.wake, for_weights)

    def close(self) -> None:
        """End the thread, once what is being drawn is drawn, and the engine. Requests that wait fail."""
        for request in self._waiting:
            request.finish(RuntimeError("the engine was closed before this request was drawn"))
        self._waiting = {}
        self._thread.shutdown()
        self.engine.close()

    def _parameters(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return self.engine._parameters()

    def _check_ready(self) -> None:
        self.engine._check_ready()

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _drive(self) -> None:
        """Draw until nothing waits."""
        while self._waiting:
            await self._open.wait()
            await self._quiet()
            # It may have been paused meanwhile, and requests withdrawn.
            if self._open.is_set() and self._waiting:
                await self._draw(self._next())

    async def _quiet(self) -> None:
        """Let the loop run until no new requests come."""
        before, turns = self._submitted, 0
        while turns < _QUIET_TURNS:
            await asyncio.sleep(0)
            before, turns = self._submitted, turns + 1 if before == self._submitted else 0

    def _next(self) -> list[BatchedRequest]:
        """Take the oldest request, and all those that can be drawn with it: only their limits may differ."""
        oldest = next(iter(self._waiting)).sampling
        taken = [request for request in self._waiting if _go_together(request.sampling, oldest)]
        for request in taken:
            del self._waiting[request]
        return taken

    async def _draw(self, taken: list[BatchedRequest]) -> None:
        self._idle.clear()
        try:
            found: Sequence[Generation | Exception] = await self._in_thread(_generate, self.engine, taken)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            found = [error] * len(taken)
        finally:
            self._idle.set()
        for request, drawn in zip(taken, found, strict=True):
            request.finish(drawn)


def _go_together(one: SamplingConfig, other: SamplingConfig) -> bool:
    return one is other or dataclasses.replace(one, max_new_tokens=other.max_new_tokens) == other


def _generate(engine: RolloutEngine, taken: list[BatchedRequest]) -> list[Generation]:
    """Draw requests that differ in their limits at most."""
    limits = [request.sampling.max_new_tokens for request in taken]
    columns = {
        "prompt_id": [request.prompt_id for request in taken],
        "sample_id": [request.sample_id for request in taken],
    }
    if min(limits) < max(limits):
        columns["max_new_tokens"] = limits
    prompts = Batch.from_rows({"tokens": [request.tokens for request in taken]}, columns)
    drawn = engine.generate(prompts, dataclasses.replace(taken[0].sampling, max_new_tokens=max(limits)))
    tokens, logprobs = drawn["tokens"].tolist(), drawn["rollout_logprob"].tolist()
    spans = zip((drawn.offsets[:-1] + drawn["prompt_length"]).tolist(), drawn.offsets[1:].tolist(), strict=True)
    return [
        Generation(tokens[start:end], logprobs[start:end], [version] * (end - start), "length" if cut else "stop")
        for (start, end), version, cut in zip(
            spans, drawn["weight_version"].tolist(), drawn["truncated"].tolist(), strict=True
        )
    ]
