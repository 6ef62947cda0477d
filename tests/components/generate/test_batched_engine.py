"""Single requests on an engine that generates batches: composition of the batches, and results of each request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from components.batch import Batch
from components.generate.async_engine import Generation
from components.generate.async_opening import open_async_engine
from components.generate.batched_engine import BatchedEngine
from components.generate.config import HFRolloutConfig, SamplingConfig
from components.generate.engine import Completions
from components.generate.hf_engine import HFRolloutEngine
from components.models.loading import load_policy
from components.weights.publisher import WeightHandle, WeightPublisher
from tests.messages import says

END = 1
UNLUCKY = 13


class WatchedEngine(HFRolloutEngine):
    """Wrapper of an engine. It records batches, can wait for a gate inside of them, and fails at a given step or
    version.
    """

    def __init__(self, model_path: Path) -> None:
        super().__init__(model_path)
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def _complete(self, prompts: Batch, sampling: SamplingConfig) -> Completions:
        self.batches.append(len(prompts))
        assert self.gate.wait(300)
        if sampling.step == UNLUCKY:
            raise RuntimeError("an unlucky step")
        return super()._complete(prompts, sampling)

    def _load(self, handle: WeightHandle, with_digests: bool) -> dict[str, str]:
        digests = super()._load(handle, with_digests)
        return dict.fromkeys(digests, "damaged") if handle.version == UNLUCKY else digests


@pytest.fixture(scope="module")
def watched(tied_model: Path) -> WatchedEngine:
    return WatchedEngine(tied_model)


@pytest.fixture
def inner(watched: WatchedEngine) -> WatchedEngine:
    """One engine for all tests that do not change its weights."""
    watched.batches.clear()
    return watched


def some_rows(count: int) -> list[list[int]]:
    """1 to 6 tokens each."""
    return [[(3 * i + 5 * t * t) % 20 for t in range(1 + i % 6)] for i in range(count)]


def numbered(rows: list[list[int]]) -> Batch:
    return Batch.from_rows({"tokens": rows}, {"prompt_id": list(range(len(rows))), "sample_id": [0] * len(rows)})


def expected(batch: Batch) -> list[Generation]:
    """Return the result of `generate` in the form of request results."""
    drawn = []
    for i in range(len(batch)):
        inside = batch.row(i, "action_mask")
        tokens = batch.row(i, "tokens")[inside].tolist()
        versions = [int(batch["weight_version"][i])] * len(tokens)
        finish = "length" if batch["truncated"][i] else "stop"
        drawn.append(Generation(tokens, batch.row(i, "rollout_logprob")[inside].tolist(), versions, finish))
    return drawn


def run(inner: HFRolloutEngine, scene: Callable[[BatchedEngine], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine with the engine. It must finish within the limit."""
    engine = BatchedEngine(inner)

    async def run_episodes() -> Any:
        return await asyncio.wait_for(scene(engine), 300)

    try:
        return asyncio.run(run_episodes())
    finally:
        engine._thread.shutdown()


async def ask(engine: BatchedEngine, rows: list[list[int]], sampling: SamplingConfig) -> list[Generation]:
    requests = [engine.submit(row, sampling, prompt_id=i) for i, row in enumerate(rows)]
    return [await request.result() for request in requests]


async def begun(inner: WatchedEngine, batches: int) -> None:
    while len(inner.batches) < batches:
        await asyncio.sleep(0.001)


async def turns() -> None:
    """The event loop runs many more iterations than the start of a batch takes."""
    for _ in range(200):
        await asyncio.sleep(0)


def test_concurrent_requests_form_one_batch_with_bit_equal_results(inner: WatchedEngine) -> None:
    rows, sampling = some_rows(24), SamplingConfig(max_new_tokens=10, seed=5, step=3)
    drawn = run(inner, lambda engine: ask(engine, rows, sampling))
    assert inner.batches == [24]
    assert drawn == expected(inner.generate(numbered(rows), sampling))
    assert {each.finish for each in drawn} == {"stop", "length"}


def test_2000_concurrent_requests_each_get_their_result(inner: WatchedEngine) -> None:
    rows, sampling = some_rows(2000), SamplingConfig(max_new_tokens=4)
    drawn = run(inner, lambda engine: ask(engine, rows, sampling))
    assert drawn == expected(inner.generate(numbered(rows), sampling))


def test_tokens_do_not_depend_on_other_requests_or_their_order(inner: WatchedEngine) -> None:
    rows, sampling = some_rows(12), SamplingConfig(max_new_tokens=8)

    async def scene(engine: BatchedEngine) -> list[list[Generation]]:
        alone = [await engine.submit(row, sampling, prompt_id=i).result() for i, row in enumerate(rows)]
        backwards = [engine.submit(rows[i], sampling, prompt_id=i) for i in reversed(range(12))]
        return [await ask(engine, rows, sampling), alone, [await request.result() for request in reversed(backwards)]]

    together, *others = run(inner, scene)
    for other in others:
        for one, two in zip(together, other, strict=True):
            assert (one.tokens, one.finish) == (two.tokens, two.finish)
            assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)


def test_requests_with_different_limits_share_a_batch(inner: WatchedEngine) -> None:
    rows, whole = some_rows(20), SamplingConfig(max_new_tokens=10)
    limits = [1 + i % 10 for i in range(20)]

    async def scene(engine: BatchedEngine) -> list[Generation]:
        requests = [
            engine.submit(row, SamplingConfig(max_new_tokens=limits[i]), prompt_id=i) for i, row in enumerate(rows)
        ]
        return [await request.result() for request in requests]

    drawn = run(inner, scene)
    assert inner.batches == [20]
    for generation, full, limit in zip(drawn, expected(inner.generate(numbered(rows), whole)), limits, strict=True):
        assert generation.tokens == full.tokens[:limit]
        assert generation.finish == ("stop" if generation.tokens[-1] == END else "length")


def test_requests_with_different_sampling_are_separate_batches(inner: WatchedEngine) -> None:
    rows = some_rows(6)
    hot, cold = SamplingConfig(max_new_tokens=5), SamplingConfig(max_new_tokens=5, temperature=0)

    async def scene(engine: BatchedEngine) -> list[list[Generation]]:
        return await asyncio.gather(*(ask(engine, rows, sampling) for sampling in (hot, cold)))

    drawn = run(inner, scene)
    assert inner.batches == [6, 6]
    assert drawn == [expected(inner.generate(numbered(rows), sampling)) for sampling in (hot, cold)]


def test_concurrent_callers_share_a_batch_in_every_turn(inner: WatchedEngine) -> None:
    sampling = SamplingConfig(max_new_tokens=2)

    async def environment(depth: int) -> None:
        # Nested tasks: each of them runs in another iteration of the event loop.
        if depth:
            await asyncio.wait_for(environment(depth - 1), 300)

    async def episode(engine: BatchedEngine, number: int) -> None:
        for turn in range(3):
            await environment(number % 8)
            await engine.submit([2 + turn], sampling, prompt_id=number).result()

    async def scene(engine: BatchedEngine) -> None:
        await asyncio.gather(*(episode(engine, number) for number in range(40)))

    run(inner, scene)
    assert inner.batches == [40, 40, 40]


def test_the_event_loop_is_not_blocked_and_new_requests_form_the_next_batch(inner: WatchedEngine) -> None:
    sampling = SamplingConfig(max_new_tokens=3)

    async def scene(engine: BatchedEngine) -> None:
        inner.gate.clear()
        requests = [engine.submit([2, 5], sampling)]
        await begun(inner, 1)
        requests += [engine.submit([3, i], sampling) for i in range(2)]
        await turns()
        requests += [engine.submit([4, i], sampling) for i in range(3)]
        assert inner.batches == [1]
        inner.gate.set()
        assert all([(await request.result()).tokens for request in requests])

    run(inner, scene)
    assert inner.batches == [1, 5]


def test_the_output_of_a_request_arrives_exactly_once(inner: WatchedEngine) -> None:
    async def scene(engine: BatchedEngine) -> tuple[list[int], list[int], Generation]:
        request = engine.submit([3, 5, 8], SamplingConfig(max_new_tokens=6))
        first = [token async for piece in request for token in piece.tokens]
        return first, [token async for piece in request for token in piece.tokens], await request.result()

    first, again, drawn = run(inner, scene)
    assert first == drawn.tokens
    assert again == []


def test_an_aborted_request_returns_its_generated_tokens_or_never_starts(inner: WatchedEngine) -> None:
    sampling = SamplingConfig(max_new_tokens=6)

    async def scene(engine: BatchedEngine) -> list[Generation]:
        inner.gate.clear()
        drawn, other = engine.submit([2, 5], sampling), engine.submit([2, 5], sampling)
        await begun(inner, 1)
        waits = engine.submit([2, 7], sampling)
        ending = asyncio.create_task(drawn.abort())
        generations = [await waits.abort()]
        assert not ending.done()
        inner.gate.set()
        generations += [await ending, await other.result()]
        assert await other.abort() == generations[-1]
        return generations

    waited, aborted, whole = run(inner, scene)
    assert waited == Generation([], [], [], "abort")
    assert (aborted.tokens, aborted.finish) == (whole.tokens, "abort")
    assert whole.finish != "abort"
    assert inner.batches == [2]


def test_a_cancelled_caller_does_not_affect_the_others(inner: WatchedEngine) -> None:
    async def scene(engine: BatchedEngine) -> Generation:
        inner.gate.clear()
        request = engine.submit([2, 5], SamplingConfig(max_new_tokens=3))
        waits = asyncio.create_task(request.result())
        await begun(inner, 1)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        inner.gate.set()
        return await request.result()

    assert len(run(inner, scene).tokens) > 0


def test_a_pause_begins_after_the_running_batch_and_lasts_until_resume(inner: WatchedEngine) -> None:
    sampling = SamplingConfig(max_new_tokens=3)

    async def scene(engine: BatchedEngine) -> None:
        inner.gate.clear()
        first = engine.submit([2, 5], sampling)
        await begun(inner, 1)
        pausing = asyncio.create_task(engine.pause())
        await turns()
        assert not pausing.done()
        inner.gate.set()
        await pausing
        assert (await first.result()).tokens
        second = engine.submit([3, 5], sampling)
        await turns()
        assert inner.batches == [1]
        await engine.resume()
        assert (await second.result()).tokens
        third = engine.submit([4, 5], sampling)
        for _ in range(3):
            await asyncio.sleep(0)
        # The batch of this request was about to begin.
        await engine.pause()
        await turns()
        assert inner.batches == [1, 1]
        await engine.resume()
        assert (await third.result()).tokens

    run(inner, scene)
    assert inner.batches == [1, 1, 1]


def test_weights_change_between_batches_and_each_token_has_its_weight_version(
    tied_model: Path, other_tied_model: Path, tmp_path: Path
) -> None:
    inner, rows, sampling = WatchedEngine(tied_model), some_rows(6), SamplingConfig(max_new_tokens=4)
    newer = load_policy(other_tied_model).named_parameters()
    handle = WeightPublisher(tmp_path / "w").publish(7, newer, with_digests=True)

    async def scene(engine: BatchedEngine) -> tuple[list[Generation], list[Generation]]:
        inner.gate.clear()
        before = asyncio.create_task(ask(engine, rows, sampling))
        await begun(inner, 1)
        receiving = asyncio.create_task(engine.receive(handle, verify=True))
        await asyncio.sleep(0)
        after = asyncio.create_task(ask(engine, rows, sampling))
        inner.gate.set()
        while not receiving.done():
            # A request may arrive at any of these moments.
            engine.submit([2], sampling)
            await asyncio.sleep(0)
        await receiving
        assert engine.weight_version == 7
        return await before, await after

    before, after = run(inner, scene)
    old, new = HFRolloutEngine(tied_model), HFRolloutEngine(other_tied_model)
    assert before == expected(old.generate(numbered(rows), sampling))
    assert [each.tokens for each in after] == [each.tokens for each in expected(new.generate(numbered(rows), sampling))]
    assert {version for each in after for version in each.versions} == {7}


def test_after_an_incomplete_weight_transfer_requests_wait_for_a_complete_version(
    tied_model: Path, other_tied_model: Path, tmp_path: Path
) -> None:
    newer = list(load_policy(other_tied_model).named_parameters())
    publisher = WeightPublisher(tmp_path / "w")
    damaged, whole = (publisher.publish(version, newer, with_digests=True) for version in (UNLUCKY, UNLUCKY + 1))

    async def scene(engine: BatchedEngine) -> Generation:
        with pytest.raises(RuntimeError, match=f"version {UNLUCKY} "):
            await engine.receive(damaged, verify=True)
        with pytest.raises(ValueError, match="weights"):
            engine.submit([2], SamplingConfig())
        await engine.receive(whole, verify=True)
        with pytest.raises(ValueError, match=says(f"version {UNLUCKY} ", f"version {UNLUCKY + 1}")):
            await engine.receive(damaged)
        return await engine.submit([2], SamplingConfig(max_new_tokens=2)).result()

    assert run(WatchedEngine(tied_model), scene).versions[0] == UNLUCKY + 1


def test_an_error_is_raised_for_all_requests_of_its_batch_and_no_others(inner: WatchedEngine) -> None:
    lucky, unlucky = SamplingConfig(max_new_tokens=3), SamplingConfig(max_new_tokens=3, step=UNLUCKY)

    async def scene(engine: BatchedEngine) -> list[Any]:
        requests = [engine.submit([2, i], unlucky if i % 2 else lucky) for i in range(6)]
        first = await asyncio.gather(*(request.result() for request in requests), return_exceptions=True)
        await engine.sleep()
        with pytest.raises(ValueError, match=r"wake\(\)"):
            await engine.submit([2], lucky).result()
        await engine.wake()
        return [*first, await engine.submit([2], lucky).result()]

    errors = run(inner, scene)
    assert [isinstance(each, Generation) for each in errors] == [True, False, True, False, True, False, True]
    assert {str(each) for each in errors[1:6:2]} == {"an unlucky step"}


def test_an_invalid_request_is_rejected_immediately(inner: WatchedEngine) -> None:
    engine = BatchedEngine(inner)
    with pytest.raises(ValueError, match="0 tokens"):
        engine.submit([], SamplingConfig())
    with pytest.raises(ValueError, match=says("60 tokens", "max_new_tokens=5", 64)):
        engine.submit([2] * 60, SamplingConfig(max_new_tokens=5))


def test_closing_an_engine_fails_waiting_requests(tied_model: Path) -> None:
    async def run_episodes() -> None:
        engine = await open_async_engine(tied_model, HFRolloutConfig())
        drawn = engine.submit([2], SamplingConfig(max_new_tokens=2))
        assert (await drawn.result()).tokens
        waits = engine.submit([2], SamplingConfig(max_new_tokens=2))
        engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await waits.result()
        with pytest.raises(RuntimeError, match="shutdown"):
            await engine.submit([2], SamplingConfig(max_new_tokens=2)).result()

    asyncio.run(run_episodes())
