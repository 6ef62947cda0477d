"""Engine for single requests on top of a batch engine. All queued requests form the next batch.

The batch engine runs in a thread of its own, so that the asyncio loop is not blocked.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from components.batch import Batch
from components.generate.async_engine import AsyncEngine, Finish, Generation, Piece, Request
from components.generate.config import SamplingConfig

if TYPE_CHECKING:
    from components.generate.engine import RolloutEngine
    from components.weights.publisher import WeightHandle

T = TypeVar("T")
_QUIET_TURNS = 32
"""Number of consecutive iterations of the asyncio loop without a new request before a batch starts. Callers that await
only each other and their own tasks have all submitted their requests by then, so the batches are the same in every
run."""


class BatchedRequest(Request):
    """A request that returns all its tokens at once."""

    def __init__(
        self, engine: BatchedEngine, tokens: Sequence[int], sampling: SamplingConfig, prompt_id: int, sample_id: int
    ) -> None:
        self.tokens = list(tokens)
        self.sampling = sampling
        self.prompt_id = prompt_id
        self.sample_id = sample_id
        self._engine = engine
        self._aborted = self._taken = False
        # An event instead of a future: a caller that is cancelled while it awaits a future cancels the future too, and
        # asyncio.shield takes more time than all other work on a request.
        self._finished = asyncio.Event()
        self._drawn: Generation | None = None
        self._error: Exception | None = None
        self._trace: TracebackType | None = None

    async def __aiter__(self) -> AsyncIterator[Piece]:
        drawn = await self.result()
        # All tokens arrive together, so there is at most one piece, which is yielded only once.
        if drawn.tokens and not self._taken:
            self._taken = True
            yield Piece(drawn.tokens, drawn.logprobs)

    async def result(self) -> Generation:
        await self._finished.wait()
        if self._error is not None:
            # One error is raised for all requests of a batch, and each raise would extend its traceback.
            raise self._error.with_traceback(self._trace)
        assert self._drawn is not None
        return self._drawn

    async def abort(self) -> Generation:
        """Abort the request. A queued request has no tokens. A running one is completed with its batch."""
        self._aborted = True
        if self._engine.withdraw(self):
            self.finish(Generation([], [], [], "abort"))
        return await self.result()

    def finish(self, drawn: Generation | Exception) -> None:
        """Set the result or the error, and wake all waiters."""
        if isinstance(drawn, Exception):
            self._error = drawn
            self._trace = drawn.__traceback__
        elif self._aborted:
            self._drawn = dataclasses.replace(drawn, finish="abort")
        else:
            self._drawn = drawn
        self._finished.set()


class BatchedEngine(AsyncEngine):
    """Engine for single requests that runs any `RolloutEngine`, which must not be used directly while requests are in
    progress.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__()
        self.engine = engine
        self.positions = engine.positions
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generate")
        # A dict serves as an ordered set: requests are generated in order of arrival, and withdrawn in constant time.
        self._waiting: dict[BatchedRequest, None] = {}
        self._submitted = 0
        self._driver: asyncio.Task[None] | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def weight_version(self) -> int:
        """Version of the weights in use. 0 denotes the weights that were loaded."""
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
        # The task ends when the queue is empty, so a new request starts it again.
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive(), name="generate")
        return request

    def withdraw(self, request: BatchedRequest) -> bool:
        """Remove a request from the queue. Return True if it was still queued."""
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
            # All tokens of a batch are sampled with the same version, so the running batch is finished first.
            await self.pause()
            await self._in_thread(self.engine.receive, handle, verify)
            await self.resume()

    async def metrics(self) -> dict[str, float]:
        return self.engine.metrics()

    async def sleep(self, level: int = 1) -> int:
        return await self._in_thread(self.engine.sleep, level)

    async def wake(self, for_weights: bool = False) -> None:
        await self._in_thread(self.engine.wake, for_weights)

    def close(self) -> None:
        """Finish the running batch, and stop the thread and the engine. Queued requests fail."""
        # Otherwise the callers of queued requests would wait forever.
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
        """Generate batches until the queue is empty."""
        while self._waiting:
            await self._open.wait()
            await self._quiet()
            # While `_quiet` waited, the engine may have been paused and all requests withdrawn.
            if self._open.is_set() and self._waiting:
                await self._draw(self._next())

    async def _quiet(self) -> None:
        """Wait until no request has been submitted for `_QUIET_TURNS` iterations of the loop."""
        before = self._submitted
        turns = 0
        while turns < _QUIET_TURNS:
            await asyncio.sleep(0)
            turns += 1
            if self._submitted != before:
                before = self._submitted
                turns = 0

    def _next(self) -> list[BatchedRequest]:
        """Remove and return the oldest request, and all requests whose sampling differs from it at most in
        `max_new_tokens`.
        """
        oldest = next(iter(self._waiting)).sampling
        # Requests with other sampling parameters remain in the queue and form the next batch.
        taken = [request for request in self._waiting if _go_together(request.sampling, oldest)]
        for request in taken:
            del self._waiting[request]
        return taken

    async def _draw(self, taken: list[BatchedRequest]) -> None:
        # `pause` waits for this event, so the weights never change within a batch.
        self._idle.clear()
        try:
            results: Sequence[Generation | Exception] = await self._in_thread(_generate, self.engine, taken)
        except Exception as error:  # noqa: BLE001 - every error is raised for the callers of these requests
            results = [error] * len(taken)
        finally:
            self._idle.set()
        for request, drawn in zip(taken, results, strict=True):
            request.finish(drawn)


def _go_together(sampling: SamplingConfig, other: SamplingConfig) -> bool:
    return sampling is other or dataclasses.replace(sampling, max_new_tokens=other.max_new_tokens) == other


def _generate(engine: RolloutEngine, taken: list[BatchedRequest]) -> list[Generation]:
    """Generate the completions of requests that differ at most in `max_new_tokens`."""
    limits = [request.sampling.max_new_tokens for request in taken]
    columns = {
        "prompt_id": [request.prompt_id for request in taken],
        "sample_id": [request.sample_id for request in taken],
    }
    if min(limits) < max(limits):
        columns["max_new_tokens"] = limits
    prompts = Batch.from_rows({"tokens": [request.tokens for request in taken]}, columns)
    drawn = engine.generate(prompts, dataclasses.replace(taken[0].sampling, max_new_tokens=max(limits)))
    # One conversion of each column: slices of tensors for every request would take longer.
    tokens = drawn["tokens"].tolist()
    logprobs = drawn["rollout_logprob"].tolist()
    starts = (drawn.offsets[:-1] + drawn["prompt_length"]).tolist()
    rows = (starts, drawn.offsets[1:].tolist(), drawn["weight_version"].tolist(), drawn["truncated"].tolist())
    results = []
    for start, end, version, is_truncated in zip(*rows, strict=True):
        finish: Finish = "stop"
        if is_truncated:
            finish = "length"
        results.append(Generation(tokens[start:end], logprobs[start:end], [version] * (end - start), finish))
    return results
