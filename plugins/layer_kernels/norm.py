"""RMS norm that reads its input once forward, and input and gradient once backward (Zhang and Sennrich 2019,
https://arxiv.org/abs/1910.07467).

Legend: `N` rows, `H` numbers of a row, `P` programs of the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ELEMENTS = 4096
"""Number of numbers of a block of rows, unless a single row has more."""
WARPS = 8
"""Number of warps of a program. With 4, a row of more than 4096 numbers exceeds the registers of a thread."""
PROGRAMS = 512
"""Maximum number of programs of the backward pass. Each sums the gradient of the weights over its rows."""


@triton.jit
def _forward_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    result: tl.tensor,
    inverse: tl.tensor,
    rows: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    place = row[:, None] * size + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32) + OFFSET
    root = 1.0 / tl.sqrt(tl.sum(value * value, 1) / size + eps)
    tl.store(inverse + row, root, mask=row < rows)
    tl.store(result + place, value * root[:, None] * factor[None, :], mask=inside)


@triton.jit
def _backward_kernel(
    grad: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    inverse: tl.tensor,
    result: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    size: tl.tensor,
    programs: tl.tensor,
    OFFSET: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    factor = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32) + OFFSET
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(program * ROWS, rows, programs * ROWS):  # pyright: ignore[reportArgumentType] - integers
        row = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < size)[None, :]
        place = row[:, None] * size + column[None, :]
        root = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * root
        slope = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        inner = slope * factor[None, :]
        mean = tl.sum(inner * normed, 1) / size
        tl.store(result + place, root * (inner - normed * mean[:, None]), mask=inside)
        if SUMS:
            total += tl.sum(slope * normed, 0)
    if SUMS:
        tl.store(sums + program * size + column, total, mask=column < size)


def _blocks(size: int) -> dict[str, int]:
    """Return the numbers of rows and columns of a block."""
    block = 1 << max(0, size - 1).bit_length()
    return {"ROWS": max(1, min(32, ELEMENTS // block)), "BLOCK": block}


@torch.library.custom_op("troupe::rms_norm", mutates_args=())
def norm_rows(x_NH: Tensor, weight_H: Tensor, eps: float, offset: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Normalize rows.

    Args:
        x_NH: [N, H], contiguous.
        weight_H: [H] weights.
        eps: number that is added to the mean square.
        offset: number that is added to the weights.
        dtype: dtype of the result.

    Returns:
        [N, H] result, and [N] float32, the inverse of the root mean square of each row.
    """
    result_NH, inverse_N = torch.empty_like(x_NH, dtype=dtype), x_NH.new_empty(len(x_NH), dtype=torch.float32)
    rows, size = x_NH.shape
    blocks = _blocks(size)
    if rows:
        kernel: Any = _forward_kernel[(triton.cdiv(rows, blocks["ROWS"]),)]
        tensors = x_NH, weight_H, result_NH, inverse_N
        kernel(*tensors, rows, size, eps, OFFSET=offset, **blocks, num_warps=WARPS)
    return result_NH, inverse_N


@norm_rows.register_fake
def _(x_NH: Tensor, weight_H: Tensor, eps: float, offset: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(x_NH, dtype=dtype), x_NH.new_empty(len(x_NH), dtype=torch.float32)


@torch.library.custom_op("troupe::rms_norm_gradient", mutates_args=())
def norm_gradient(
    grad_NH: Tensor, x_NH: Tensor, weight_H: Tensor, inverse_N: Tensor, offset: float, has_sums: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the rows, [N, H], and [P, H] float32 parts of the gradient of the weights.

    Args:
        grad_NH: [N, H] gradient of the result, contiguous.
        x_NH: see `norm_rows`, like the next three.
        weight_H: weights.
        inverse_N: second result of `norm_rows`.
        offset: number that is added to the weights.
        has_sums: compute the parts. Otherwise P is 0.
    """
    rows, size = x_NH.shape
    blocks = _blocks(size)
    programs = min(PROGRAMS, -(-rows // blocks["ROWS"]))
    result_NH = torch.empty_like(x_NH)
    sums_PH = inverse_N.new_empty(programs * has_sums, size)
    if rows:
        kernel: Any = _backward_kernel[(programs,)]
        tensors = grad_NH, x_NH, weight_H, inverse_N, result_NH, sums_PH
        kernel(*tensors, rows, size, programs, OFFSET=offset, SUMS=has_sums, **blocks, num_warps=WARPS)
    return result_NH, sums_PH


@norm_gradient.register_fake
def _(
    grad_NH: Tensor,  # noqa: ARG001
    x_NH: Tensor,
    weight_H: Tensor,  # noqa: ARG001
    inverse_N: Tensor,
    offset: float,  # noqa: ARG001
    has_sums: bool,
) -> tuple[Tensor, Tensor]:
    programs = min(PROGRAMS, -(-len(x_NH) // _blocks(x_NH.shape[1])["ROWS"]))
    return torch.empty_like(x_NH), inverse_N.new_empty(programs * has_sums, x_NH.shape[1])


class RMSNorm(torch.autograd.Function):
    """RMS norm of the last dimension: x / sqrt(mean(x^2) + eps) * (offset + weight), in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
        x_NH = x.reshape(-1, x.shape[-1])
        result_NH, inverse_N = norm_rows(x_NH.contiguous(), weight_H, eps, offset, dtype)
        ctx.save_for_backward(x_NH, weight_H, inverse_N)
        ctx.offset = offset
        return result_NH.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]: the decorator's type loses ctx
        x_NH, weight_H, inverse_N = ctx.saved_tensors
        grad_NH = grad.reshape(x_NH.shape).contiguous()
        has_sums = ctx.needs_input_grad[1]
        result_NH, sums_PH = norm_gradient(grad_NH, x_NH.contiguous(), weight_H, inverse_N, ctx.offset, has_sums)
        weight_grad_H = sums_PH.sum(0).to(weight_H.dtype) if has_sums else None
        return result_NH.view(grad.shape), weight_grad_H, None, None, None
