"""Generation with vLLM in batches: takes a batch of prompts and returns all completions.

Use vLLM on GPUs and for models that are not tiny: continuous batching keeps its memory filled, whatever the lengths of
the sequences. Every request has its own seed, so tokens do not depend on the number of engines, the order of prompts
or other requests. With the same seed they differ from the tokens of the hf engine.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import torch
import torch.distributed as dist

from components.batch import Batch
from components.generate.config import SamplingConfig
from components.generate.engine import Completions, RolloutEngine
from components.generate.engine_start import started, undisturbed
from components.generate.times import GenerationTimes
from components.models.response_ends import end_tokens_of
from components.process.heartbeat import beat
from components.registry import load
from components.weights.publisher import WeightHandle
from plugins.vllm import options
from plugins.vllm.adapters import adapter_request, arrived, no_change
from plugins.vllm.config import VLLMRolloutConfig

_LOOK_S = 5.0
"""Interval in seconds of the check that vLLM's process is alive."""


class VLLMRolloutEngine(RolloutEngine):
    """Engine that runs vLLM's `LLM` in this process, in a child process, or in one process per device."""

    on_finished: Callable[[int, Sequence[int]], object] | None = None
    """Called with the index of a prompt and the tokens of its response when the response is complete."""

    def __init__(self, model_path: str | Path, config: VLLMRolloutConfig | None = None) -> None:
        """
        Args:
            model_path: folder or hub name of a causal model. See end_tokens.py for the tokens that end a response.
            config: configuration of the engine.
        """
        super().__init__()
        self.config = config or VLLMRolloutConfig()
        self.positions = options.positions_of(model_path, self.config)
        self._model_path = model_path
        self._end_tokens = end_tokens_of(model_path)
        self._awake: set[str] = set()
        self._times = GenerationTimes()
        options.prepare_process(self.config, in_process=not self.config.own_process)
        set_num_threads, dtype = torch.set_num_threads, torch.get_default_dtype()
        # vLLM seeds the generator, changes the default dtype and fixes the number of threads. A trainer may share this
        # process, so all three are restored.
        with torch.random.fork_rng():
            from vllm import LLM

            self._llm: Any = started(LLM, **options.engine_arguments(model_path, self.config))
        torch.set_num_threads = set_num_threads
        torch.set_default_dtype(dtype)
        options.log_model_runner(self._llm.llm_engine.vllm_config)
        self._watch_steps()
        self.holds_adapters = self.config.lora_rank > 0
        self._adapters: Any = adapter_request() if self.holds_adapters else None
        self._engine_check: Any = options.open_check(self.config)
        self._routes: Any = None
        if self.config.returns_routes:
            self._routes = load("engine routes", self.config.NAME, "rollout.routing_replay")(model_path)
        if self.holds_adapters:
            with no_change(self._parameters(), self.config.lora_rank) as request:
                self._llm.llm_engine.add_lora(request)

    def receive(self, handle: WeightHandle, verify: bool = False) -> None:
        """See `RolloutEngine.receive`."""
        super().receive(handle, verify)
        if self._engine_check is not None:
            self._engine_check.received()

    def wake(self, for_weights: bool = False) -> None:
        """See `RolloutEngine.wake`. If the engine received weights while asleep, they are checked now."""
        super().wake(for_weights)
        self.check()

    def check(self, probe: Any = None) -> dict[str, float]:
        """See `RolloutEngine.check`. A sleeping engine is checked when it wakes."""
        check: Any = self._engine_check
        if check is None or (due := check.next(probe, self._asleep)) is None:
            return getattr(check, "metrics", {})
        rows = check.rows(due, self.positions)
        gap_N = check.gap(due, self._scores(rows))
        if check.is_explained(gap_N):
            return check.metrics
        marks = []
        for row in rows:
            self._llm.collective_rpc("mark_layers")
            self._scores([row])
            marks.append(self._llm.collective_rpc("layer_marks")[0])
        raise check.error(self.weight_version, due, gap_N, marks)

    def _scores(self, rows: list[list[int]]) -> list[list[float]]:
        prompts: list[Any] = [{"prompt_token_ids": row} for row in rows]
        parameters = self._engine_check.sampling()
        outputs = self._llm.generate(prompts, parameters, use_tqdm=False, lora_request=self._adapters)
        return [self._engine_check.scores(output) for output in outputs]

    def _generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        with self._times.generation(sampling):
            return super()._generate(prompts, sampling)

    def _complete(self, prompts: Batch, sampling: SamplingConfig) -> Completions:
        outputs: list[Any] = []
        if len(prompts):
            rows, parameters = options.requests(prompts, sampling, self._end_tokens)
            # vLLM numbers the requests in their order.
            self._first_request = self._llm.request_counter.counter
            outputs = self._llm.generate(rows, parameters, use_tqdm=False, lora_request=self._adapters)
        drawn = options.completions([output.outputs[0] for output in outputs], sampling.max_new_tokens)
        if self._routes is None:
            return drawn
        return replace(drawn, per_token=self._routes.columns(outputs))

    def _watch_steps(self) -> None:
        """At each step of vLLM send a heartbeat, measure the step, and report complete responses."""
        engine = self._llm.llm_engine
        step = engine.step

        def beating_step() -> Any:
            outputs = step()  # generates one token of each running request
            beat()
            if self.on_finished is not None:
                for output in outputs:
                    self.on_finished(int(output.request_id) - self._first_request, output.outputs[0].token_ids)
            return outputs

        def has_first_token(outputs: Any) -> bool:
            # vLLM reports on the prefill of a request with its first token.
            return any(output.prefill_stats is not None for output in outputs.outputs)

        engine.step = beating_step
        engine.engine_core.get_output = self._times.timed(engine.engine_core.get_output, has_first_token)
        if self.config.own_process:
            # vLLM waits without a timeout, so a killed process would hang this one.
            engine.engine_core.outputs_queue.get = partial(_next_outputs, engine.engine_core)

    def _load(self, handle: WeightHandle, with_digests: bool) -> dict[str, str]:
        if self.holds_adapters:
            with arrived(handle, with_digests) as (request, adapter_digests):
                self._llm.llm_engine.add_lora(request)
            digests = [adapter_digests]
        else:
            digests = self._llm.collective_rpc("receive_weights", args=(pickle.dumps(handle), with_digests))
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM keeps what prompts were to the old weights; nothing may be generated meanwhile")
        return options.same_digests(digests)

    def metrics(self) -> dict[str, float]:
        memory = self._llm.collective_rpc("gpu_memory")[0] | getattr(self._engine_check, "metrics", {})
        return memory | self._times.take()

    def _parameters(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return options.parameters_of(self._model_path)

    def _sleep(self, level: int) -> int:
        free = sum(self._llm.collective_rpc("free_bytes"))
        undisturbed(self._llm.sleep, level=level)
        self._awake = set()
        return sum(self._llm.collective_rpc("free_bytes")) - free

    def _wake(self, for_weights: bool) -> None:
        if parts := options.parts_to_wake(for_weights, self._awake):
            self._llm.wake_up(tags=parts)
            self._awake |= set(parts)

    def close(self) -> None:
        """End vLLM's processes. Keep this process's group, which vLLM would destroy and a trainer may use."""
        destroy = dist.destroy_process_group
        dist.destroy_process_group = lambda group=None: None  # noqa: ARG005
        try:
            self._llm.llm_engine.engine_core.shutdown()
        finally:
            dist.destroy_process_group = destroy


def _next_outputs(client: Any) -> Any:
    """Return the next outputs of vLLM's process.

    Raises:
        EngineDeadError: the process has ended (vLLM's error).
    """
    while True:
        with suppress(Empty):
            return Queue.get(client.outputs_queue, timeout=_LOOK_S)
        client.ensure_alive()
