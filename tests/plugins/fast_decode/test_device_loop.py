"""The loop for GPUs on a CPU: its reads of the device per token, its draws, and its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import GPT2Config, GPT2LMHeadModel

from components.batch import Batch
from components.generate.config import SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from components.generate.sampling import request_seeds
from plugins.fast_decode.decoding import FastDecoding
from plugins.fast_decode.device_loop import CHECK_EVERY, gumbel_max
from tests.components.generate.test_hf_engine import completions, same_prompt, some_prompts
from tests.components.helpers.device_reads import READS

WAITING = READS - {"numpy"} | {"nonzero", "unique", "masked_select"}
"""Calls that make the host wait for a GPU. `numpy` follows a `cpu` there."""


class Waits(TorchFunctionMode):
    """Count the calls that would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        is_indexing = name in ("__getitem__", "__setitem__")
        # A boolean index with a scalar value is a masked fill, without a shape that depends on numbers.
        sets_scalar = name == "__setitem__" and not isinstance(args[2], Tensor)
        by_mask = is_indexing and isinstance(args[1], Tensor) and args[1].dtype == torch.bool and not sets_scalar
        if name in WAITING or by_mask:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def engines(tied_model: Path) -> Iterator[tuple[HFRolloutEngine, HFRolloutEngine]]:
    """The engine as on a CPU, and with the loop for a GPU."""
    plain, device = HFRolloutEngine(tied_model), HFRolloutEngine(tied_model)
    assert isinstance(device._decoding, FastDecoding)
    device._decoding.is_on_gpu = True
    yield plain, device


def waits_of(engine: HFRolloutEngine, prompts: Batch, tokens: int) -> int:
    sampling = SamplingConfig(max_new_tokens=tokens, temperature=0)
    with Waits() as waits:
        engine.generate(prompts, sampling)
    return waits.count


def never_ends(engine: HFRolloutEngine) -> None:
    engine.end_tokens = torch.zeros(0, dtype=torch.int64)


def test_the_host_waits_for_the_device_once_per_16_tokens(engines: tuple[HFRolloutEngine, HFRolloutEngine]) -> None:
    prompts = some_prompts()
    per_token = []
    for engine in engines:
        never_ends(engine)
        # The difference of two lengths leaves out what a generation reads once.
        short, long = (waits_of(engine, prompts, tokens) for tokens in (CHECK_EVERY, 3 * CHECK_EVERY))
        per_token.append((long - short) / (2 * CHECK_EVERY))
    on_cpu, on_gpu = per_token
    assert on_gpu == 1 / CHECK_EVERY
    assert on_cpu >= 5


@pytest.mark.parametrize("limited", [False, True])
def test_greedy_tokens_are_those_of_the_loop_on_a_cpu(
    engines: tuple[HFRolloutEngine, HFRolloutEngine], limited: bool
) -> None:
    prompts = some_prompts()
    if limited:
        prompts = prompts.with_sequences(max_new_tokens=torch.tensor([1 + 2 * i for i in range(24)]))
    sampling = SamplingConfig(max_new_tokens=50, temperature=0)
    expected, actual = (engine.generate(prompts, sampling) for engine in engines)
    assert completions(actual) == completions(expected)
    assert torch.equal(actual["truncated"], expected["truncated"])
    torch.testing.assert_close(actual["rollout_logprob"], expected["rollout_logprob"])


def test_sampled_tokens_do_not_depend_on_the_batch_and_finished_rows_leave_it(
    engines: tuple[HFRolloutEngine, HFRolloutEngine],
) -> None:
    engine = engines[1]
    # At this temperature an end token is as likely as any of the 20 tokens, so rows end all the time.
    prompts, sampling = same_prompt([2, 9, 4], 64), SamplingConfig(max_new_tokens=60, temperature=30)
    rows_per_call: list[int] = []
    hook = engine.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: rows_per_call.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    together = engine.generate(prompts, sampling)
    hook.remove()
    assert rows_per_call[:2] == [1, 64]
    assert rows_per_call[CHECK_EVERY + 1] < 48
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    parts = [engine.generate(prompts.select(index), sampling) for index in order.split(24)]
    apart = [row for part in parts for row in completions(part)]
    assert [completions(together)[i] for i in order] == apart
    assert completions(engine.generate(prompts, SamplingConfig(max_new_tokens=60, temperature=30, step=1))) != apart


def test_draws_have_the_frequencies_of_the_probabilities_and_never_exclude_a_token() -> None:
    draws, vocabulary = 2**17, 50
    logits_V = torch.linspace(3, -7, vocabulary)
    logits_V[3] = -torch.inf
    seed_N = request_seeds(7, 2, torch.arange(draws).numpy() // 8, torch.arange(draws).numpy() % 8, 31)
    seed_N2 = torch.from_numpy(seed_N).view(torch.int32).unflatten(0, (draws, 2))
    token_N = gumbel_max(logits_V.log_softmax(0).expand(draws, -1), seed_N2)
    probability_V = logits_V.softmax(0)
    frequency_V = token_N.bincount(minlength=vocabulary) / draws
    error_V = (probability_V * (1 - probability_V) / draws).sqrt()
    assert frequency_V[3] == 0
    assert ((frequency_V - probability_V).abs() <= 4.5 * error_V + 1e-9).all()
    chi_square = (((frequency_V - probability_V) ** 2 / probability_V)[probability_V > 1e-4]).sum() * draws
    assert chi_square < 90  # 38 degrees of freedom: a larger value has a probability below 1e-5


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_finished_rows_do_not_exceed_the_positions_of_the_model(tmp_path: Path, is_on_gpu: bool) -> None:
    config = GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=2, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    engine = HFRolloutEngine(tmp_path)
    never_ends(engine)
    engine._decoding.is_on_gpu = is_on_gpu  # pyright: ignore[reportAttributeAccessIssue]
    # The last row ends after 2 tokens. A row of 40 does not leave the cache alone.
    rows, limits = [[2, 3, 4]] * 39 + [[2] + [5] * 61], [40] * 39 + [2]
    numbers = {"prompt_id": list(range(40)), "sample_id": [0] * 40, "max_new_tokens": limits}
    result = engine.generate(Batch.from_rows({"tokens": rows}, numbers), SamplingConfig(max_new_tokens=40))
    assert result.lengths.tolist() == [43] * 39 + [64]


def test_logits_that_are_not_numbers_raise_an_error(engines: tuple[HFRolloutEngine, HFRolloutEngine]) -> None:
    engine = engines[1]
    with torch.no_grad():
        next(parameter for parameter in engine.model.parameters() if isinstance(parameter, nn.Parameter)).fill_(
            torch.nan
        )
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.generate(some_prompts(), SamplingConfig(max_new_tokens=4))
