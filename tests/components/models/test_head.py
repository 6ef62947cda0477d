"""Legend: M states with a label, H dimensions of a state, V vocabulary, N all tokens of a batch."""

import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from components.batch import Batch
from components.models import head as head_logprobs
from components.models.causal import token_logprobs
from components.models.head import plain_head, state_logprobs
from components.models.loading import load_policy
from components.models.logprobs import label_logprobs
from tests.components.helpers.packing_cases import small_chunks

SMALL: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.fixture
def batch() -> Batch:
    return Batch.from_rows({"tokens": [[2, 5, 9, 0, 1], [7], [2, 3, 4, 5, 6, 7, 8, 1], [11, 0]]})


def layer(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States [7, 6], weights [11, 6], bias [11] and labels [7]."""
    generator = torch.Generator().manual_seed(1)
    shapes = (7, 6), (11, 6), (11,)
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return tensors[0], tensors[1], tensors[2], torch.randint(11, (7,), generator=generator)


def by_logits(
    state_MH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, label_M: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    logits_MV = nn.functional.linear(state_MH, weight_VH, bias_V)
    logprob_M, entropy_M = label_logprobs(logits_MV, torch.arange(len(label_M)), label_M, scale, with_entropy=True)
    assert entropy_M is not None
    return logprob_M, entropy_M


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_gradients_pass_gradcheck(rows: int) -> None:
    state_MH, weight_VH, bias_V, label_M = layer(torch.float64)

    def compute(state_MH: Tensor, weight_VH: Tensor, bias_V: Tensor) -> Tensor:
        logprob_M, entropy_M = state_logprobs(state_MH, weight_VH, bias_V, label_M, 0.7, with_entropy=True)
        assert entropy_M is not None
        return logprob_M + 0.5 * entropy_M

    with small_chunks(rows):
        assert torch.autograd.gradcheck(compute, (state_MH, weight_VH, bias_V))


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("bfloat16", 0.02)])
@pytest.mark.parametrize("rows", [2, 100])
@pytest.mark.parametrize("casts", [False, True], ids=["", "autocast"])
def test_values_and_gradients_equal_those_of_complete_logits(dtype: str, rtol: float, rows: int, casts: bool) -> None:
    ours, theirs = layer(getattr(torch, dtype)), layer(getattr(torch, dtype))
    # Some labels have no gradient, and one entropy has none.
    weight_M = torch.tensor([1.0, 0.0, -2.0, 0.5, 0.0, 1.0, 3.0])
    results = []
    ways: list[Callable[..., Any]] = [partial(state_logprobs, with_entropy=True), by_logits]
    for columns, compute in zip((ours, theirs), ways, strict=True):
        with small_chunks(rows), torch.autocast("cpu", torch.bfloat16, enabled=casts):
            logprob_M, entropy_M = compute(*columns, scale=0.9)
            assert logprob_M.dtype == entropy_M.dtype == torch.float32
            ((logprob_M * weight_M).sum() + 0.3 * entropy_M[2]).backward()
        results.append((logprob_M, entropy_M, *(x.grad for x in columns[:3])))
    rtol = max(rtol, 0.02 if casts else 0.0)
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * float(expected.detach().abs().max()))


def test_autocast_computes_logits_in_bfloat16_and_the_rest_in_float32() -> None:
    state_MH, weight_VH, _, label_M = layer()
    with torch.autocast("cpu", torch.bfloat16):
        logprob_M, _ = state_logprobs(state_MH, weight_VH, None, label_M, 1.0, with_entropy=False)
    logits_MV = (state_MH.bfloat16() @ weight_VH.bfloat16().t()).float()
    expected_M = logits_MV.log_softmax(-1)[torch.arange(7), label_M]
    torch.testing.assert_close(logprob_M, expected_M, rtol=0, atol=1e-6)
    logprob_M.sum().backward()
    assert weight_VH.grad is not None
    assert weight_VH.grad.dtype == torch.float32


def test_sums_over_bfloat16_chunks_are_accumulated_in_float32() -> None:
    # 300 one-dimensional states whose label is one of two equal logits: each adds 1/2 to the gradient of its weight. A
    # bfloat16 sum stops at 128, because the spacing of numbers is 1 there.
    weight_VH = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    state_MH, label_M = torch.ones(300, 1, dtype=torch.bfloat16), torch.zeros(300, dtype=torch.int64)
    with small_chunks(rows=1):
        state_logprobs(state_MH, weight_VH, None, label_M, 1.0, with_entropy=False)[0].sum().backward()
    assert weight_VH.grad is not None
    assert weight_VH.grad.flatten().tolist() == [150.0, -150.0]


def test_the_logits_of_a_chunk_are_freed_before_the_next_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    logits: list[weakref.ref[Tensor]] = []

    def recorded(*arguments: Any) -> Tensor:
        assert not any(reference() is not None for reference in logits)
        result = nn.functional.linear(*arguments)
        logits.append(weakref.ref(result))
        return result

    monkeypatch.setattr(head_logprobs, "linear", recorded)
    state_MH, weight_VH, bias_V, label_M = layer()
    with small_chunks(rows=3):
        state_logprobs(state_MH, weight_VH, bias_V, label_M, 1.0, with_entropy=True)[0].sum().backward()
    assert len(logits) == 6


def test_frozen_parameters_get_no_gradient() -> None:
    state_MH, weight_VH, bias_V, label_M = layer()
    state_logprobs(state_MH, weight_VH.detach(), None, label_M, 1.0, False)[0].sum().backward()
    assert state_MH.grad is not None
    state_logprobs(state_MH.detach(), weight_VH, bias_V.detach(), label_M, 1.0, False)[0].sum().backward()
    assert weight_VH.grad is not None
    assert bias_V.grad is None


def test_no_labels_give_gradients_of_zeros() -> None:
    state_MH, weight_VH, _, label_M = layer()
    logprob_M, entropy_M = state_logprobs(state_MH[:0], weight_VH, None, label_M[:0], 1.0, with_entropy=True)
    assert entropy_M is not None
    assert logprob_M.shape == entropy_M.shape == (0,)
    (logprob_M.sum() + entropy_M.sum()).backward()
    assert weight_VH.grad is not None
    assert not weight_VH.grad.any()


def test_a_temperature_of_0_is_refused() -> None:
    state_MH, weight_VH, _, label_M = layer()
    with pytest.raises(ValueError, match=r"scale=0\.0"):
        state_logprobs(state_MH, weight_VH, None, label_M, 0.0, with_entropy=False)


@pytest.mark.parametrize("tied", [True, False])
def test_training_from_hidden_states_equals_training_from_logits(
    tied: bool, tied_model: Path, untied_model: Path, batch: Batch
) -> None:
    learned: list[tuple[Tensor, dict[str, Tensor]]] = []
    for from_states in (True, False):
        model: Any = load_policy(tied_model if tied else untied_model)
        model.logprobs_from_states &= from_states
        assert (plain_head(model) is not None) == from_states
        with small_chunks(rows=2):
            output = token_logprobs(model, batch, 0.8, with_entropy=True)
            assert output.entropy_N is not None
            (output.logprob_N + 0.2 * output.entropy_N).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        learned.append((torch.stack([output.logprob_N, output.entropy_N]), gradients))
    torch.testing.assert_close(learned[0][0], learned[1][0], rtol=0, atol=1e-6)
    for name, gradient in learned[1][1].items():
        # Tolerance for gradients of about 2: CPU types differ in the order of summation.
        torch.testing.assert_close(
            learned[0][1][name], gradient, rtol=0, atol=1e-5 * max(1.0, float(gradient.abs().max()))
        )


def test_only_states_with_a_label_are_multiplied(
    tied_model: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sizes = load_policy(tied_model), []

    def counted(state_KH: Tensor, *rest: Any) -> Tensor:
        sizes.append(len(state_KH))
        return nn.functional.linear(state_KH, *rest)

    monkeypatch.setattr(head_logprobs, "linear", counted)
    with small_chunks(rows=5):
        token_logprobs(model, batch)
    # In 4 rows of 7 positions, 12 tokens have a predecessor.
    assert sizes == [5, 5, 2]


CHANGED: dict[str, Callable[[], Any]] = {
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=3.0),
    "granite": lambda: transformers.GraniteConfig(**SMALL, logits_scaling=8.0),
    "cohere": lambda: transformers.CohereConfig(**SMALL),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_model_that_modifies_its_logits_is_evaluated_through_its_logits(
    name: str, tmp_path: Path, batch: Batch
) -> None:
    transformers.AutoModelForCausalLM.from_config(CHANGED[name]()).save_pretrained(tmp_path)
    model = load_policy(tmp_path)
    assert plain_head(model) is None
    row = [2, 5, 9, 0, 1]
    with torch.no_grad():
        logprob_TV = model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
    expected = [0.0, *(logprob_TV[t - 1, row[t]].item() for t in range(1, 5))]
    assert token_logprobs(model, batch).logprob_N[:5].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_replaced_head_is_called_unchanged(tied_model: Path, batch: Batch) -> None:
    class Louder(nn.Linear):
        """Like an adapter: its output does not follow from its weights alone."""

        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model: Any = load_policy(tied_model)
    expected_N = token_logprobs(model, batch, temperature=0.5).logprob_N
    louder = Louder(64, 20, bias=False)
    louder.weight = model.lm_head.weight
    model.lm_head = louder
    assert plain_head(model) is None
    torch.testing.assert_close(token_logprobs(model, batch, temperature=1.0).logprob_N, expected_N, rtol=0, atol=1e-5)


# Program that prints the peak growth of memory relative to the bytes of the float32 logits.
MEASURE = """
import re, torch
from components.models.head import state_logprobs

def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])

torch.set_num_threads(1)
state = torch.randn(2048, 8, requires_grad=True)
weight = torch.randn(50_000, 8, requires_grad=True)
label = torch.arange(2048)
state_logprobs(state[:256], weight[:512], None, label[:256], 0.9, True)[0].sum().backward()
before = kilobytes("VmRSS")
logprob, entropy = state_logprobs(state, weight, None, label, 0.9, True)
(logprob + entropy).sum().backward()
print((kilobytes("VmHWM") - before) * 1024 / (4 * 2048 * 50_000))
"""


@pytest.mark.full
def test_the_complete_logits_are_never_in_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr
    # Chunks of 335 rows, with a few copies while the next chunk is computed.
    assert float(done.stdout) < 0.6
