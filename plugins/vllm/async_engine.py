"""Generation with vLLM request by request: for agents, and for rollouts that continue across weight updates.

Everything in this module runs in one asyncio loop. vLLM generates in a separate process.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from components.generate.async_engine import AsyncEngine, Generation, Piece, Request
from components.generate.config import SamplingConfig
from components.generate.engine_start import gpu_memory_locked, started
from components.generate.sampling import request_seeds
from components.models.response_ends import end_tokens_of
from components.process.heartbeat import beat
from components.weights.publisher import WeightHandle
from plugins.vllm import options
from plugins.vllm.adapters import adapter_request, arrived, no_change
from plugins.vllm.config import VLLMRolloutConfig


class VLLMRequest(Request):
    """A request in flight. Iterate over its pieces as they arrive, or wait for the complete result."""

    def __init__(self, engine: AsyncVLLMEngine, request_id: str, outputs: AsyncIterator[Any]) -> None:
        self.request_id = request_id
        self._engine = engine
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._collect(outputs), name=request_id)

    async def _collect(self, outputs: AsyncIterator[Any]) -> Generation:
        tokens: list[int] = []
        logprobs: list[float] = []
        last: Any = None
        try:
            async for output in outputs:
                last = output.outputs[0]
                piece = Piece(list(last.token_ids), options.drawn_logprobs(last))
                tokens += piece.tokens
                logprobs += piece.logprobs
                if piece.tokens:
                    beat()
                    self._pieces.put_nowait(piece)
        finally:
            self._pieces.put_nowait(None)
        if last is None:
            return Generation([], [], [], "abort")
        spans = last.weight_versions or []
        versions = [version for span in spans for version in [int(span.version)] * (span.end - span.start)]
        assert len(versions) == len(tokens) == len(logprobs), (len(versions), len(tokens), len(logprobs))
        return Generation(tokens, logprobs, versions, last.finish_reason)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while (piece := await self._pieces.get()) is not None:
            yield piece
        await self.result()

    async def result(self) -> Generation:
        # Without the shield, a caller that is cancelled would end the request for all others. `abort` ends it.
        return await asyncio.shield(self._task)

    async def abort(self) -> Generation:
        while not self._task.done():
            # Repeat the abort: vLLM ignores it if the request has not reached its scheduler yet.
            await self._engine.abort(self.request_id)
            await asyncio.wait([self._task], timeout=0.05)
        return await self.result()


class AsyncVLLMEngine(AsyncEngine):
    """Engine that runs vLLM's `AsyncLLM`. Create it with `open`, in the asyncio loop that uses it."""

    def __init__(self, model_path: str | Path, config: VLLMRolloutConfig, llm: Any) -> None:
        super().__init__()
        self.config = config
        self.positions = options.positions_of(model_path, config)
        self._model_path = model_path
        self._end_tokens = end_tokens_of(model_path)
        self._llm: Any = llm
        self._ids = itertools.count()
        self._awake: set[str] = set()
        self._engine_check: Any = options.open_check(config)
        self.holds_adapters = config.lora_rank > 0
        self._adapters: Any = adapter_request() if self.holds_adapters else None

    @classmethod
    async def open(cls, model_path: str | Path, config: VLLMRolloutConfig | None = None) -> AsyncVLLMEngine:
        """Start an engine.

        Args:
            model_path: folder or hub name of a causal model. See end_tokens.py for the tokens that end a response.
            config: configuration of the engine. The engine always runs in a separate process.
        """
        config = config or VLLMRolloutConfig()
        # AsyncLLM starts a separate process for its engine in any case. `in_process` avoids a second one inside it.
        options.prepare_process(config, in_process=True)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**options.engine_arguments(model_path, config))
        llm = await asyncio.to_thread(started, AsyncLLM.from_engine_args, arguments)
        options.log_model_runner(llm.vllm_config)
        try:
            await llm.update_weight_version("0")
            if config.lora_rank:
                with no_change(options.parameters_of(model_path), config.lora_rank) as request:
                    await llm.add_lora(request)
            return cls(model_path, config, llm)
        except BaseException:
            llm.shutdown()
            raise

    def submit(
        self, tokens: Sequence[int], sampling: SamplingConfig, *, prompt_id: int = 0, sample_id: int = 0
    ) -> VLLMRequest:
        self._check_request(tokens, sampling)
        from vllm.sampling_params import RequestOutputKind

        seed = int(request_seeds(sampling.seed, sampling.step, prompt_id, sample_id, len(tokens))[0])
        parameters = options.sampling_parameters(sampling, seed, sampling.max_new_tokens, self._end_tokens)
        parameters.output_kind = RequestOutputKind.DELTA
        request_id = f"request-{next(self._ids)}"
        prompt = {"prompt_token_ids": list(tokens)}
        outputs = self._llm.generate(prompt, parameters, request_id, lora_request=self._adapters)
        return VLLMRequest(self, request_id, outputs)

    async def abort(self, request_id: str) -> None:
        """End a request. Its result holds the tokens generated so far. A finished request is not changed."""
        await self._llm.abort(request_id)

    async def pause(self) -> None:
        """Pause generation between two tokens. Running and new requests wait. Their KV cache is discarded; `resume`
        computes it again with the weights that the engine holds then.
        """
        await self._llm.pause_generation(mode="keep", clear_cache=True)

    async def resume(self) -> None:
        await self._llm.resume_generation()

    async def receive(self, handle: WeightHandle, verify: bool = False) -> None:
        """Replace the engine's weights by a published version, between two tokens of the requests in flight. See
        `AsyncEngine`.
        """
        async with self._updating:
            self.check_receivable(handle)
            await self.pause()
            self._damaged = True
            if self.holds_adapters:
                with arrived(handle, verify) as (request, adapter_digests):
                    await self._llm.add_lora(request)
                digests = [adapter_digests]
            else:
                digests = await self._llm.collective_rpc("receive_weights", args=(pickle.dumps(handle), verify))
            self.received(handle, options.same_digests(digests) if verify else None)
            await self._llm.update_weight_version(str(handle.version))
            await self.resume()
            if self._engine_check is not None:
                self._engine_check.received()

    async def check(self, probe: Any = None) -> dict[str, float]:
        """Check the engine as `VLLMRolloutEngine.check` does, while other requests run."""
        check: Any = self._engine_check
        if check is None or (due := check.next(probe, self._asleep)) is None:
            return getattr(check, "metrics", {})
        rows = check.rows(due, self.positions)
        gap_N = check.gap(due, [await self._score(row) for row in rows])
        if check.is_explained(gap_N):
            return check.metrics
        # Layer marks record all running requests, so they cannot be taken here. The error names no layer.
        raise check.error(self.weight_version, due, gap_N, [])

    async def _score(self, tokens: list[int]) -> list[float]:
        """Return the log-probability of each token except the first."""
        prompt = {"prompt_token_ids": tokens}
        request_id = f"check-{next(self._ids)}"
        outputs = self._llm.generate(prompt, self._engine_check.sampling(), request_id, lora_request=self._adapters)
        return self._engine_check.scores([output async for output in outputs][-1])

    async def metrics(self) -> dict[str, float]:
        return (await self._llm.collective_rpc("gpu_memory"))[0] | getattr(self._engine_check, "metrics", {})

    async def sleep(self, level: int = 1) -> int:
        if self._asleep or not self._can_free():
            self._asleep = True
            return 0
        free = sum(await self._llm.collective_rpc("free_bytes"))
        with gpu_memory_locked():
            await self._llm.sleep(level)
        self._asleep, self._damaged, self._awake = True, self._damaged or level == 2, set()
        return sum(await self._llm.collective_rpc("free_bytes")) - free

    async def wake(self, for_weights: bool = False) -> None:
        if self._asleep and self._can_free() and (parts := options.parts_to_wake(for_weights, self._awake)):
            await self._llm.wake_up(parts)
            self._awake |= set(parts)
        self._asleep = self._asleep and for_weights
        await self.check()

    def _parameters(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return options.parameters_of(self._model_path)

    def close(self) -> None:
        """End vLLM's processes. Requests in flight fail."""
        self._llm.shutdown()
        # AsyncLLM calls shutdown again when it is garbage-collected, which fails at interpreter exit.
        self._llm.shutdown = lambda timeout=None: None  # noqa: ARG005
        self._llm = None
