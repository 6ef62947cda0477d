"""Legend: R rows of logits, V vocabulary, M labels; B sequences of at most T tokens."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from components.batch import Batch
from components.models import logprobs
from components.models.causal import token_logprobs
from components.models.logprobs import label_logprobs
from tests.messages import says

# Special logits: 0, ties, values that overflow exp, and values that masks of logits use.
logit = st.one_of(st.floats(-8, 8, width=32), st.sampled_from([0.0, 1.0, 1000.0, -1000.0, -math.inf]))
upstream = st.one_of(st.just(0.0), st.floats(-2, 2, width=32))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[float]], list[int], list[int], list[float], list[float]]:
    """Logits [R][V] whose first column is finite, and rows, labels and gradients of log-probability and entropy [M]."""
    width = draw(st.integers(1, 9))
    one_row = st.tuples(st.floats(-8, 8, width=32), st.lists(logit, min_size=width - 1, max_size=width - 1))
    rows = [[first, *rest] for first, rest in draw(st.lists(one_row, max_size=40))]
    # Rows may be selected in any order. Rows of padding and of last tokens have no label.
    chosen = draw(st.permutations(range(len(rows))))[: draw(st.integers(0, len(rows)))]
    possible = [[v for v, x in enumerate(rows[r]) if x > -math.inf] for r in chosen]
    labels = [draw(st.sampled_from(columns)) for columns in possible]
    weights = st.lists(upstream, min_size=len(chosen), max_size=len(chosen))
    return rows, list(chosen), labels, draw(weights), draw(weights)


def slow_distribution(row: list[float], scale: float) -> tuple[list[float], list[float]]:
    """Return log-probabilities and probabilities of softmax(row / scale) in double precision."""
    shifted = [(x - max(row)) / scale for x in row]
    log_sum = math.log(sum(math.exp(x) for x in shifted))
    return [x - log_sum for x in shifted], [math.exp(x - log_sum) for x in shifted]


def slow_entropy(row: list[float], scale: float) -> float:
    return -sum(q * log_q for log_q, q in zip(*slow_distribution(row, scale), strict=True) if q > 0)


def slow_gradient(row: list[float], label: int, scale: float, logprob_grad: float, entropy_grad: float) -> list[float]:
    entropy, gradient = slow_entropy(row, scale), []
    for v, (log_q, q) in enumerate(zip(*slow_distribution(row, scale), strict=True)):
        x = logprob_grad * ((v == label) - q) / scale
        gradient.append(x - (entropy_grad * q * (log_q + entropy) / scale if q > 0 else 0.0))
    return gradient


def tensors(case: tuple[list[list[float]], list[int], list[int], list[float], list[float]]) -> tuple[Tensor, ...]:
    rows, chosen, labels, logprob_grads, entropy_grads = case
    logits_RV = torch.tensor(rows).view(len(rows), len(rows[0]) if rows else 3)
    indices = torch.tensor(chosen, dtype=torch.int64), torch.tensor(labels, dtype=torch.int64)
    return logits_RV, *indices, torch.tensor(logprob_grads), torch.tensor(entropy_grads)


@given(cases(), st.sampled_from([1.0, 0.7, 3.0]), st.sampled_from([1, 12, 2**18]))
@settings(max_examples=100, deadline=None)
def test_values_and_gradients_agree_with_a_scalar_loop_for_every_chunk_size(
    case: tuple[list[list[float]], list[int], list[int], list[float], list[float]], scale: float, chunk: int
) -> None:
    logits_RV, row_M, label_M, logprob_grad_M, entropy_grad_M = tensors(case)
    leaf_RV = logits_RV.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "_CHUNK_ELEMENTS", {"cpu": chunk})
        logprob_M, entropy_M = label_logprobs(leaf_RV.clone(), row_M, label_M, scale, with_entropy=True)
        assert entropy_M is not None
        ((logprob_M * logprob_grad_M).sum() + (entropy_M * entropy_grad_M).sum()).backward()
    slow_gradients = [[0.0] * logits_RV.shape[1] for _ in range(len(logits_RV))]
    for i, (row, label) in enumerate(zip(row_M.tolist(), label_M.tolist(), strict=True)):
        logits = logits_RV[row].tolist()
        assert logprob_M[i].item() == pytest.approx(slow_distribution(logits, scale)[0][label], rel=1e-6, abs=1e-5)
        assert entropy_M[i].item() == pytest.approx(slow_entropy(logits, scale), rel=1e-5, abs=1e-5)
        weights = logprob_grad_M[i].item(), entropy_grad_M[i].item()
        slow_gradients[row] = slow_gradient(logits, label, scale, *weights)
    assert leaf_RV.grad is not None
    expected_RV = torch.tensor(slow_gradients).view_as(logits_RV)
    torch.testing.assert_close(leaf_RV.grad, expected_RV, rtol=1e-5, atol=1e-5)


def test_a_row_equals_a_calculation_by_hand() -> None:
    # Logits 0 and 2 log 3 at temperature 2: p = 1/4, 3/4. Entropy log 4 - 3/4 log 3. d log p_0 = (1 - 1/4, -3/4) / 2.
    # The previous row has no label.
    leaf_RV = torch.tensor([[5.0, 7.0], [0.0, 2 * math.log(3)]], requires_grad=True)
    logprob_M, entropy_M = label_logprobs(leaf_RV * 1, torch.tensor([1]), torch.tensor([0]), 2.0, with_entropy=True)
    assert entropy_M is not None
    assert logprob_M.item() == pytest.approx(-math.log(4))
    assert entropy_M.item() == pytest.approx(math.log(4) - 0.75 * math.log(3))
    logprob_M.sum().backward()
    assert leaf_RV.grad is not None
    assert leaf_RV.grad.flatten().tolist() == pytest.approx([0.0, 0.0, 0.375, -0.375])


@pytest.mark.parametrize(
    "weigh",
    [lambda logprob, entropy: logprob, lambda logprob, entropy: entropy, lambda logprob, entropy: logprob + entropy],
    ids=["logprob", "entropy", "both"],
)
def test_gradients_pass_gradcheck(weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
    # The logits are a leaf, which is not overwritten, because gradcheck runs backward many times.
    row_M, label_M = torch.tensor([4, 0, 2]), torch.tensor([1, 6, 1])

    def compute(logits_RV: Tensor) -> Tensor:
        logprob_M, entropy_M = label_logprobs(logits_RV, row_M, label_M, 0.7, with_entropy=True)
        assert entropy_M is not None
        return weigh(logprob_M, entropy_M)

    generator = torch.Generator().manual_seed(1)
    leaf_RV = torch.randn(5, 7, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(compute, leaf_RV)


def by_log_softmax(logits_RV: Tensor, row_M: Tensor, label_M: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The plain computation, with several copies of the logits."""
    logprob_MV = (logits_RV[row_M].float() / scale).log_softmax(-1)
    return logprob_MV.gather(1, label_M[:, None]).squeeze(1), -(logprob_MV.exp() * logprob_MV).sum(-1)


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 1.0), ("float32", 3000.0), ("bfloat16", 5.0), ("float16", 5.0)]
)
def test_values_and_gradients_are_those_of_log_softmax_to_rounding(dtype: str, size: float) -> None:
    generator = torch.Generator().manual_seed(2)
    # 300,000 elements: two chunks.
    leaf_RV = (size * torch.randn(300, 1000, generator=generator)).to(getattr(torch, dtype)).requires_grad_()
    other_RV = leaf_RV.detach().clone().requires_grad_()
    row_M, label_M = torch.arange(1, 299), torch.randint(1000, (298,), generator=generator)
    logprob_M, entropy_M = label_logprobs(leaf_RV * 1, row_M, label_M, 0.9, with_entropy=True)
    expected_M, expected_entropy_M = by_log_softmax(other_RV, row_M, label_M, 0.9)
    assert entropy_M is not None
    assert logprob_M.dtype == entropy_M.dtype == torch.float32
    torch.testing.assert_close(logprob_M, expected_M, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy_M, expected_entropy_M, rtol=1e-5, atol=1e-5)
    weight_M = torch.randn(298, generator=generator)
    (weight_M * (logprob_M + entropy_M)).sum().backward()
    (weight_M * (expected_M + expected_entropy_M)).sum().backward()
    assert leaf_RV.grad is not None
    assert leaf_RV.grad.dtype == leaf_RV.dtype
    # The relative spacing of the 16-bit types is 2^-8 and 2^-11.
    tolerance = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
    torch.testing.assert_close(leaf_RV.grad, other_RV.grad, rtol=tolerance, atol=1e-5)


def test_float64_stays_float64() -> None:
    logprob_M, entropy_M = label_logprobs(
        torch.zeros(1, 4).double(), torch.tensor([0]), torch.tensor([1]), with_entropy=True
    )
    assert entropy_M is not None
    assert logprob_M.dtype == entropy_M.dtype == torch.float64
    assert entropy_M.item() == pytest.approx(math.log(4), rel=1e-15)


ROW_M, LABEL_M = torch.tensor([0, 2]), torch.tensor([1, 0])


def leaf() -> Tensor:
    return torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, 0.0], [-2.0, 0.25, 1.0]], requires_grad=True)


def expected_gradient() -> Tensor:
    other_RV = leaf()
    by_log_softmax(other_RV, ROW_M, LABEL_M, 1.0)[0].sum().backward()
    assert other_RV.grad is not None
    return other_RV.grad


def test_logits_may_be_used_elsewhere_and_twice() -> None:
    leaf_RV = leaf()
    logits_RV = leaf_RV * 1
    square = (logits_RV**2).sum()
    first_M, _ = label_logprobs(logits_RV, ROW_M, LABEL_M)
    second_M, _ = label_logprobs(logits_RV.view(3, 3), ROW_M, LABEL_M)
    (square + first_M.sum() + second_M.sum()).backward()
    assert torch.equal(logits_RV, leaf())
    torch.testing.assert_close(leaf_RV.grad, 2 * expected_gradient() + 2 * leaf_RV.detach())


def test_a_second_derivative_is_an_error() -> None:
    leaf_RV = leaf()
    logprob_M, _ = label_logprobs(leaf_RV * 1, ROW_M, LABEL_M)
    (grad_RV,) = torch.autograd.grad((logprob_M**2).sum(), leaf_RV, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad_RV.sum().backward()


def test_rows_that_share_memory_are_not_overwritten() -> None:
    # The same row three times: its gradient is the sum of all three.
    leaf_V = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    shared_RV = (leaf_V * 1).expand(3, 3)
    label_logprobs(shared_RV, ROW_M, LABEL_M)[0].sum().backward()
    other_V = leaf_V.detach().clone().requires_grad_()
    by_log_softmax(other_V.expand(3, 3), ROW_M, LABEL_M, 1.0)[0].sum().backward()
    torch.testing.assert_close(leaf_V.grad, other_V.grad)
    assert shared_RV[0].tolist() == [1.0, 2.0, 3.0]


def test_a_transposed_matrix_gets_the_right_gradient() -> None:
    leaf_VR = leaf().detach().t().contiguous().requires_grad_()
    label_logprobs((leaf_VR * 1).t(), ROW_M, LABEL_M)[0].sum().backward()
    assert leaf_VR.grad is not None
    torch.testing.assert_close(leaf_VR.grad.t(), expected_gradient())


def test_without_gradients_logits_are_not_overwritten_and_results_are_equal() -> None:
    logits_RV = leaf() * 1
    expected_M = by_log_softmax(logits_RV, ROW_M, LABEL_M, 1.0)[0].detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            logprob_M, entropy_M = label_logprobs(leaf() * 1, ROW_M, LABEL_M, with_entropy=True)
            logits_M, _ = label_logprobs(logits_RV, ROW_M, LABEL_M)
        assert entropy_M is not None
        assert not logprob_M.requires_grad
        assert not entropy_M.requires_grad
        torch.testing.assert_close(logprob_M, expected_M)
        torch.testing.assert_close(logits_M, expected_M)
    frozen_M, _ = label_logprobs(logits_RV.detach(), ROW_M, LABEL_M)
    assert not frozen_M.requires_grad
    assert torch.equal(logits_RV, leaf())


def test_a_nan_affects_only_its_row_and_only_if_the_row_is_used() -> None:
    leaf_RV = leaf()
    with torch.no_grad():
        leaf_RV[2, 1] = math.nan
    logprob_M, entropy_M = label_logprobs(leaf_RV * 1, ROW_M, LABEL_M, with_entropy=True)
    assert entropy_M is not None
    assert logprob_M.isnan().tolist() == entropy_M.isnan().tolist() == [False, True]
    (logprob_M[0] + entropy_M[0]).backward()
    assert leaf_RV.grad is not None
    assert leaf_RV.grad.isnan().sum() == 0
    leaf_RV.grad = None
    label_logprobs(leaf_RV * 1, ROW_M, LABEL_M)[0].sum().backward()
    assert leaf_RV.grad is not None
    assert leaf_RV.grad.isnan().any(1).tolist() == [False, False, True]
    # An incoming NaN gradient is not treated as a gradient of 0.
    leaf_RV = leaf()
    logprob_M, entropy_M = label_logprobs(leaf_RV * 1, ROW_M, LABEL_M, with_entropy=True)
    assert entropy_M is not None
    (logprob_M.sum() + entropy_M[1] * math.nan).backward()
    assert leaf_RV.grad is not None
    assert leaf_RV.grad.isnan().any(1).tolist() == [False, False, True]


def test_a_label_with_masked_logit_has_logprob_minus_infinity() -> None:
    # The other probabilities are 1/2 each: entropy log 2, and d log p_label = (1, -1/2, -1/2).
    leaf_RV = torch.tensor([[-math.inf, 4.0, 4.0]], requires_grad=True)
    logprob_M, entropy_M = label_logprobs(leaf_RV * 1, torch.tensor([0]), torch.tensor([0]), with_entropy=True)
    assert entropy_M is not None
    assert logprob_M.item() == -math.inf
    assert entropy_M.item() == pytest.approx(math.log(2))
    logprob_M.sum().backward()
    assert leaf_RV.grad is not None
    assert leaf_RV.grad.tolist() == [[1.0, -0.5, -0.5]]


def test_no_labels_give_a_gradient_of_zeros() -> None:
    none, leaf_RV = torch.zeros(0, dtype=torch.int64), leaf()
    logprob_M, entropy_M = label_logprobs(leaf_RV * 1, none, none, with_entropy=True)
    assert entropy_M is not None
    assert logprob_M.shape == entropy_M.shape == (0,)
    (logprob_M.sum() + entropy_M.sum()).backward()
    assert leaf_RV.grad is not None
    assert torch.equal(leaf_RV.grad, torch.zeros(3, 3))


def test_invalid_arguments_are_rejected() -> None:
    logits_RV = leaf() * 1
    for scale in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"scale={scale}"):
            label_logprobs(logits_RV, ROW_M, LABEL_M, scale)
    logprob_M, _ = label_logprobs(logits_RV, torch.tensor([2, 0, 2]), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=says("row_M", "twice")):
        logprob_M.sum().backward()
    assert torch.equal(logits_RV, leaf())


class Table(nn.Module):
    """A policy whose logits depend on one token only. `shape_logits` transforms them from [B, T, V]."""

    def __init__(self, shape_logits: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(
            torch.randn(6, 8, generator=torch.Generator().manual_seed(3)), freeze=False
        )
        self.shape_logits = shape_logits

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.shape_logits(self.embedding(input_ids)))


@pytest.mark.parametrize(
    "shape_logits",
    [
        lambda logits_BTV: logits_BTV[..., :6],  # a padded vocabulary
        lambda logits_BTV: torch.cat([logits_BTV, logits_BTV], 1)[:, : logits_BTV.shape[1], :6],
        lambda logits_BTV: logits_BTV[..., :6].transpose(0, 1).contiguous().transpose(0, 1),
    ],
    ids=["vocabulary", "time", "transposed"],
)
def test_sliced_logits_give_the_same_results_as_contiguous_ones(shape_logits: Callable[[Tensor], Tensor]) -> None:
    batch = Batch.from_rows({"tokens": [[2, 5, 1], [3], [0, 4, 4, 2]]})
    sliced, plain = Table(shape_logits), Table(lambda logits_BTV: logits_BTV[..., :6].contiguous())
    output, expected = (token_logprobs(model, batch, 0.8).logprob_N for model in (sliced, plain))
    assert torch.equal(output, expected)
    output.sum().backward()
    expected.sum().backward()
    assert sliced.embedding.weight.grad is not None
    torch.testing.assert_close(sliced.embedding.weight.grad, plain.embedding.weight.grad)


def test_sequences_of_one_token_are_still_part_of_a_graph() -> None:
    model = Table(lambda logits_BTV: logits_BTV[..., :6])
    output = token_logprobs(model, Batch.from_rows({"tokens": [[2], [5]]}), with_entropy=True)
    assert output.logprob_N.tolist() == [0.0, 0.0]
    assert output.entropy_N is not None
    (output.logprob_N.sum() + output.entropy_N.sum()).backward()
    assert model.embedding.weight.grad is not None
    assert not model.embedding.weight.grad.any()


# Program that prints the peak growth of memory relative to the logits. The peak is that of the whole process, so the
# memory-saving variant runs first, and the logits of the second variant reuse the memory of the first.
MEASURE = """
import re, torch
from components.models.logprobs import label_logprobs

def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])

def growth(compute):
    logits = torch.nn.Linear(16, 32768)(hidden)
    before = kilobytes("VmRSS")
    compute(logits)
    return (kilobytes("VmHWM") - before) * 1024 / (logits.numel() * 4)

def forward_and_backward(logits):
    logprob, entropy = label_logprobs(logits, row, label, 0.7, with_entropy=True)
    (logprob + 0.1 * entropy).sum().backward()

torch.set_num_threads(1)
hidden = torch.randn(2048, 16)
row = torch.arange(2047)
label = row * 16
print(growth(forward_and_backward), growth(lambda logits: logits.log_softmax(-1)[row, label].sum().backward()))
"""


@pytest.mark.full
def test_only_the_gradient_is_as_large_as_the_logits() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", MEASURE], cwd=root, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    chunked, naive = map(float, done.stdout.split())
    assert chunked < 1.25
    assert naive > 1.9  # the second number shows that the measurement works
