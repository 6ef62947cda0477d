"""Single requests to vLLM: streams, aborts, and weights that change during generation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from components.batch import Batch
from components.generate.async_engine import Generation
from components.generate.config import SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.weights.publisher import WeightPublisher
from plugins.vllm.async_engine import AsyncVLLMEngine
from plugins.vllm.config import VLLMRolloutConfig
from plugins.vllm.engine import VLLMRolloutEngine
from tests.components.helpers.vllm_models import POSITIONS, answers_of, prompts_of, write_vllm_model
from tests.messages import says

pytestmark = [pytest.mark.full, pytest.mark.vllm]
CONFIG = VLLMRolloutConfig(cpu_cache_gb=0.25)
LONG = SamplingConfig(max_new_tokens=POSITIONS - 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A model that generates no end token, so that requests last long.
    folder = write_vllm_model(tmp_path_factory.mktemp("async") / "old", seed=21, tied=True)
    for name in ("config.json", "generation_config.json"):
        settings = (folder / name).read_text()
        (folder / name).write_text(settings.replace('"eos_token_id": 1', '"eos_token_id": 999'))
    return folder


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vllm_model(tmp_path_factory.mktemp("async") / "new", seed=22, tied=True)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


@pytest.fixture(scope="module")
def engine(loop: asyncio.AbstractEventLoop, model: Path) -> Iterator[AsyncVLLMEngine]:
    engine = loop.run_until_complete(AsyncVLLMEngine.open(model, CONFIG))
    yield engine
    engine.close()


def logprobs_of(model: Path, prompt: list[int], drawn: Generation) -> torch.Tensor:
    """Return the trainer's log-probabilities [tokens] of the generated tokens."""
    batch = Batch.from_rows({"tokens": [[*prompt, *drawn.tokens]]})
    return token_logprobs(load_policy(model), batch).logprob_N[len(prompt) :].detach()


async def response(engine: AsyncVLLMEngine, prompt: list[int], sampling: SamplingConfig) -> Generation:
    return await engine.submit(prompt, sampling).result()


def test_a_request_streams_the_tokens_of_the_synchronous_engine(
    loop: asyncio.AbstractEventLoop, engine: AsyncVLLMEngine, model: Path
) -> None:
    prompt, sampling = [3, 5, 8], SamplingConfig(max_new_tokens=20, seed=4, step=2)

    async def run() -> tuple[list[int], Generation]:
        request = engine.submit(prompt, sampling, prompt_id=0, sample_id=0)
        streamed = [token async for piece in request for token in piece.tokens]
        return streamed, await request.result()

    streamed, drawn = loop.run_until_complete(run())
    assert streamed == drawn.tokens
    assert (len(drawn.tokens), drawn.finish, set(drawn.versions)) == (20, "length", {0})
    assert (logprobs_of(model, prompt, drawn) - torch.tensor(drawn.logprobs)).abs().max() < 1e-4
    synchronous = VLLMRolloutEngine(model, CONFIG)
    assert answers_of(synchronous.generate(prompts_of([prompt]), sampling)) == [drawn.tokens]
    # Rows with different limits. The second row is the same request with another limit.
    limited = prompts_of([prompt, prompt]).with_sequences(
        prompt_id=torch.zeros(2, dtype=torch.int64), max_new_tokens=torch.tensor([20, 3])
    )
    result = synchronous.generate(limited, sampling)
    assert answers_of(result) == [drawn.tokens, drawn.tokens[:3]]
    assert result["truncated"].tolist() == [True, True]
    synchronous.close()


def test_concurrent_requests_get_their_results_and_an_aborted_one_its_partial_result(
    loop: asyncio.AbstractEventLoop, engine: AsyncVLLMEngine
) -> None:
    sampling = SamplingConfig(max_new_tokens=40)

    async def run() -> tuple[list[Generation], list[Generation], Generation]:
        alone = [await engine.submit([2 + i, 5], sampling, prompt_id=i).result() for i in range(4)]
        requests = [engine.submit([2 + i % 16, 5], sampling, prompt_id=i) for i in range(64)]
        victim = engine.submit([4, 4], LONG, prompt_id=99)
        await anext(aiter(victim))
        aborted = await victim.abort()
        return alone, [await request.result() for request in requests], aborted

    alone, together, aborted = loop.run_until_complete(run())
    assert [drawn.tokens for drawn in together[:4]] == [drawn.tokens for drawn in alone]
    assert aborted.finish == "abort"
    assert 1 <= len(aborted.tokens) < LONG.max_new_tokens
    assert len(aborted.tokens) == len(aborted.logprobs) == len(aborted.versions)


def test_an_invalid_request_is_rejected_immediately(loop: asyncio.AbstractEventLoop, engine: AsyncVLLMEngine) -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        engine.submit([], SamplingConfig())
    with pytest.raises(ValueError, match=says("9 tokens", f"max_new_tokens={POSITIONS - 8}", POSITIONS)):
        engine.submit([2] * 9, SamplingConfig(max_new_tokens=POSITIONS - 8))
    assert loop.run_until_complete(engine.sleep(2)) == 0  # on a CPU nothing is freed or dropped
    with pytest.raises(ValueError, match=r"wake\(\)"):
        engine.submit([2], SamplingConfig())
    loop.run_until_complete(engine.wake())
    assert engine.has_weights
    drawn = loop.run_until_complete(response(engine, [2, 3], SamplingConfig(max_new_tokens=2)))
    assert len(drawn.versions) in (1, 2)


def test_weights_may_change_within_a_request_and_each_token_has_its_weight_version(
    loop: asyncio.AbstractEventLoop, engine: AsyncVLLMEngine, model: Path, newer: Path, tmp_path: Path
) -> None:
    """Afterwards this engine has the newer weights, so this is the last test of the file."""
    prompt = [3, 5, 8]
    publisher = WeightPublisher(tmp_path / "w")
    handle = publisher.publish(7, load_policy(newer).named_parameters(), with_digests=True)

    async def run() -> tuple[list[Generation], list[Generation]]:
        requests = [engine.submit(prompt, LONG, sample_id=i) for i in range(4)]
        first = aiter(requests[0])
        for _ in range(10):
            await anext(first)
        await engine.pause()
        # Output from before the pause still arrives. A request that continued nevertheless would end the loop.
        with pytest.raises(TimeoutError):
            while True:
                await asyncio.wait_for(anext(first), 0.5)
        await engine.resume()
        receiving, late = asyncio.create_task(engine.receive(handle, verify=True)), []
        while not receiving.done():
            # A request may arrive at any of these moments.
            late.append(engine.submit(prompt, SamplingConfig(max_new_tokens=1), prompt_id=len(late)))
            await asyncio.sleep(0.002)
        await receiving
        return [await request.result() for request in requests], [await request.result() for request in late]

    drawn, late = loop.run_until_complete(run())
    assert all(each.versions in ([0], [7]) for each in late)
    for each in drawn:
        assert len(each.tokens) == LONG.max_new_tokens
        assert each.versions == sorted(each.versions)
        assert set(each.versions) == {0, 7}
        changed = each.versions.index(7)
        logprobs_T = torch.tensor(each.logprobs)
        old, new = logprobs_of(model, prompt, each), logprobs_of(newer, prompt, each)
        assert (old - logprobs_T)[:changed].abs().max() < 1e-4
        # The prefix was computed again with the new weights, so these are the log-probabilities of the new weights.
        assert (new - logprobs_T)[changed:].abs().max() < 1e-4
    greedy = SamplingConfig(temperature=0, max_new_tokens=12)
    now = loop.run_until_complete(response(engine, prompt, greedy))
    expected = HFRolloutEngine(newer).generate(prompts_of([prompt]), greedy)
    # The end token of the newer model is not that of this engine.
    assert set(now.versions) == {7}
    assert now.tokens[: len(answers_of(expected)[0])] == answers_of(expected)[0]
    assert engine.weight_version == 7
