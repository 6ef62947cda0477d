"""plugins/kernels: the fused output layer equals the plain one, and moves few bytes."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from components.models.head import state_logprobs
from components.models.vocabulary import WHOLE_VOCABULARY, Vocabulary
from plugins.kernels import softmax
from plugins.kernels.vocabulary import FusedVocabulary
from tests.plugins.kernels.conftest import Interpret, compiled, result_of, start
from tests.plugins.kernels.moved_bytes import MovedBytes

VOCABULARY, HIDDEN, ROWS = 151_936, 896, 16_384
"""Sizes of a model with 0.5 billion parameters, and of its micro-batches on a GPU."""


@pytest.fixture(scope="module")
def errors(interpret: Interpret) -> dict[str, Any]:
    return interpret("head")


@pytest.mark.full
def test_float32_equals_float64_within_1e_5(errors: dict[str, Any]) -> None:
    float32 = [case for name, case in errors.items() if name.startswith("float32")]
    assert len(float32) == 6
    assert max(error for case in float32 for error in case["fused"]) < 1e-5


@pytest.mark.full
def test_bfloat16_is_no_further_from_float64_than_the_plain_path(errors: dict[str, Any]) -> None:
    bfloat16 = {name: case for name, case in errors.items() if name.startswith("bfloat16")}
    assert len(bfloat16) == 6
    for name, case in bfloat16.items():
        for fused, plain in zip(case["fused"], case["plain"], strict=True):
            # Both round the same gradients to bfloat16; sums of float32 in another order may round a few differently.
            assert fused <= plain * 1.01, name


@pytest.mark.full
def test_infinite_logits_frozen_weights_and_no_labels_equal_the_plain_path(interpret: Interpret) -> None:
    record = interpret("edges")
    assert record["plain"].keys() == record["fused"].keys()
    for name, expected in record["plain"].items():
        actual = torch.tensor(record["fused"][name])
        torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert actual.isfinite().all()


@pytest.mark.full
def test_two_ranks_that_share_the_vocabulary_equal_one(interpret: Interpret) -> None:
    del interpret
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [start("parts", rank, port) for rank in range(2)]
    for record in [result_of(process) for process in processes]:
        whole = record.pop("whole")
        assert sorted(record) == ["fused 100", "fused 4", "plain 100", "plain 4"]
        for actual in record.values():
            for part, expected in zip(actual, whole, strict=True):
                torch.testing.assert_close(torch.tensor(part), torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_compile_for_gpus(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    numbers = {"rows": "i32", "stride": "i32", "size": "i32", "scale": "fp32"}
    types = numbers | {"logits": f"*{dtype}", "label": "*i64", "result": "*fp32", "numbers": "*fp32"}
    for capability in (80, 90):
        assert compiled(softmax._read_kernel, types, {"BLOCK": softmax.FORWARD_BLOCK}, capability)
        for has_entropy in (True, False):
            constants = {"BLOCK": softmax.BACKWARD_BLOCK, "ENTROPY": has_entropy}
            assert compiled(softmax._write_kernel, types, constants, capability)


def bytes_per_logit(vocabulary: Vocabulary, *, frozen: bool = False) -> float:
    """Return the bytes that a forward and backward pass of the output layer moves on a GPU, per logit."""
    state_MH = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight_VH = torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=not frozen)
    label_M = torch.empty(ROWS, dtype=torch.int64, device="meta")
    with MovedBytes() as moved, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda _: False)
        patch.setattr(torch, "autocast", lambda _, **how: torch.autograd.grad_mode.set_grad_enabled(how["enabled"]))
        logprob_M, entropy_M = state_logprobs(state_MH, weight_VH, None, label_M, 0.7, True, vocabulary)
        assert entropy_M is not None
        (logprob_M - 0.1 * entropy_M).sum().backward()
    return moved.total / (ROWS * VOCABULARY)


def test_the_fused_output_layer_moves_at_most_12_bytes_per_logit() -> None:
    assert bytes_per_logit(WHOLE_VOCABULARY) > 80
    assert bytes_per_logit(FusedVocabulary()) <= 12
    assert bytes_per_logit(FusedVocabulary(), frozen=True) <= 10.1
