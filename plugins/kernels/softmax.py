"""Triton kernels over the logits of a chunk: each logit is read once forward, and read and replaced once backward.

Softmax, entropy and label logit are computed together while the maximum is updated ("online softmax", Milakov and
Gimelshein 2018, https://arxiv.org/abs/1805.02867). Numbers are float32; logits are bfloat16, float16 or float32.

Legend: `K` rows of logits, `V` vocabulary, or this rank's part of it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD_BLOCK = 4096
"""Maximum number of logits that a program reads at a time."""
BACKWARD_BLOCK = 4096
"""Maximum number of logits that a program of the backward pass replaces."""
WARPS = 8
"""Number of warps of a program."""


@triton.jit
def _read_kernel(
    logits: tl.tensor,
    label: tl.tensor,
    result: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    # Finite, because the difference of two infinities is NaN: the first block may have no other logit than -inf.
    most = -3.0e38
    total = 0.0
    slope = 0.0
    for first in range(0, size, BLOCK):  # pyright: ignore[reportArgumentType] - `size` is an integer
        place = first + tl.arange(0, BLOCK)
        x = tl.load(start + place, mask=place < size, other=float("-inf")).to(tl.float32) / scale
        new = tl.maximum(most, tl.max(x, 0))
        below = x - new
        part = tl.exp(below)
        shrink = tl.exp(most - new)
        # A logit of -inf adds 0 and not 0 * -inf, which is NaN.
        slope = shrink * (slope + total * (most - new)) + tl.sum(tl.where(below == float("-inf"), 0.0, part * below), 0)
        total = shrink * total + tl.sum(part, 0)
        most = new
    label_x = tl.load(start + tl.load(label + row)).to(tl.float32) / scale
    tl.store(result + row, most)
    tl.store(result + rows + row, label_x)
    tl.store(result + 2 * rows + row, total)
    tl.store(result + 3 * rows + row, slope)


@triton.jit
def _write_kernel(
    logits: tl.tensor,
    label: tl.tensor,
    numbers: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cell = logits + row * stride + place
    x = tl.load(cell, mask=place < size, other=0.0).to(tl.float32) / scale
    logprob = x - tl.load(numbers + row)
    probability = tl.exp(logprob)
    factor = tl.load(numbers + rows + row)
    if ENTROPY:
        # A finite bound, because 0 * -inf is NaN.
        factor += tl.load(numbers + 3 * rows + row) * tl.maximum(logprob, -1000.0)
    grad = -probability * factor
    grad += tl.where(place == tl.load(label + row), tl.load(numbers + 2 * rows + row), 0.0)
    tl.store(cell, grad, mask=place < size)


def _block(size: int, most: int) -> int:
    """Return the number of logits of a block: a power of 2."""
    return min(most, 1 << max(0, size - 1).bit_length())


def launch(kernel: Any, grid: tuple[Any, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel. `num_warps` is an argument of Triton that the types of kernels lack."""
    kernel[grid](*arguments, num_warps=WARPS, **constants)


@torch.library.custom_op("troupe::read_logit_rows", mutates_args=())
def read_rows(logits_KV: Tensor, place_K: Tensor, scale: float) -> Tensor:
    """Read rows of logits once.

    Args:
        logits_KV: [K, V], each row contiguous.
        place_K: [K] int64, index of each label among the logits of its row.
        scale: sampling temperature.

    Returns:
        [4, K] float32: maximum m of x = logit / scale; x of the label; sum of exp(x - m); sum of exp(x - m) (x - m).
    """
    rows, size = logits_KV.shape
    result_4K = torch.empty(4, rows, dtype=torch.float32, device=logits_KV.device)
    if rows:
        numbers = rows, logits_KV.stride(0), size, scale
        tensors = logits_KV, place_K.contiguous(), result_4K
        launch(_read_kernel, (rows,), *tensors, *numbers, BLOCK=_block(size, FORWARD_BLOCK))
    return result_4K


@read_rows.register_fake
def _(logits_KV: Tensor, place_K: Tensor, scale: float) -> Tensor:  # noqa: ARG001 - the signature of the operator
    return logits_KV.new_empty(4, len(logits_KV), dtype=torch.float32)


@torch.library.custom_op("troupe::replace_logit_rows", mutates_args=("logits_KV",))
def replace_rows(logits_KV: Tensor, place_K: Tensor, numbers_CK: Tensor, scale: float) -> None:
    """Replace logits by their gradient, -p (a + b log p) with p = exp(x - t), plus c at the label.

    Args:
        logits_KV: [K, V], each row contiguous, which is changed.
        place_K: [K] int64, index of each label.
        numbers_CK: [3 or 4, K] float32: t, a, c, and b. Without a fourth row, b is 0.
        scale: sampling temperature: x = logit / scale. The numbers already have the factor 1 / scale of the gradient.
    """
    rows, size = logits_KV.shape
    if not rows:
        return
    block = _block(size, BACKWARD_BLOCK)
    grid = rows, triton.cdiv(size, block)
    numbers = rows, logits_KV.stride(0), size, scale
    has_entropy = len(numbers_CK) == 4
    tensors = logits_KV, place_K.contiguous(), numbers_CK.contiguous()
    launch(_write_kernel, grid, *tensors, *numbers, BLOCK=block, ENTROPY=has_entropy)


@replace_rows.register_fake
def _(logits_KV: Tensor, place_K: Tensor, numbers_CK: Tensor, scale: float) -> None:
    pass
