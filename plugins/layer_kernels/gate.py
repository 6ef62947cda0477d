"""Gated activation, act(gate) * up (Shazeer 2020, https://arxiv.org/abs/2002.05202), with act(g) = g * sigmoid(z).

z is g for SiLU, and 2 sqrt(2 / pi) (g + 0.044715 g^3) for the tanh approximation of GELU.

Legend: `N` tokens, `I` intermediate size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1024
"""Number of numbers that a program computes."""


@triton.jit
def _exponent(gate: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    if GELU:
        return 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate


@triton.jit
def _forward_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    result: tl.tensor,
    size: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    g = tl.load(gate + row * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + place, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-_exponent(g, GELU)))
    tl.store(result + row * size + place, g * share * u, mask=inside)


@triton.jit
def _backward_kernel(
    grad: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    gate_grad: tl.tensor,
    up_grad: tl.tensor,
    size: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    d = tl.load(grad + row * size + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + place, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-_exponent(g, GELU)))
    slope = 1.0
    if GELU:
        slope = 1.5957691216057308 * (1.0 + 0.134145 * g * g)
    derivative = share + g * share * (1.0 - share) * slope
    tl.store(up_grad + row * size + place, d * g * share, mask=inside)
    tl.store(gate_grad + row * size + place, d * u * derivative, mask=inside)


@torch.library.custom_op("troupe::gated_activation", mutates_args=())
def gate_rows(gate_NI: Tensor, up_NI: Tensor, gelu: bool) -> Tensor:
    """Return act(gate) * up, [N, I]. Each row of the arguments is contiguous. `gelu` False: SiLU."""
    rows, size = gate_NI.shape
    result_NI = gate_NI.new_empty(rows, size)
    if rows:
        kernel: Any = _forward_kernel[(rows, triton.cdiv(size, BLOCK))]
        kernel(gate_NI, up_NI, result_NI, size, gate_NI.stride(0), up_NI.stride(0), GELU=gelu, BLOCK=BLOCK)
    return result_NI


@gate_rows.register_fake
def _(gate_NI: Tensor, up_NI: Tensor, gelu: bool) -> Tensor:  # noqa: ARG001
    return gate_NI.new_empty(gate_NI.shape)


@torch.library.custom_op("troupe::gated_activation_gradient", mutates_args=())
def gate_gradient(grad_NI: Tensor, gate_NI: Tensor, up_NI: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, [N, I]. `grad_NI` is contiguous; for the others see `gate_rows`."""
    rows, size = gate_NI.shape
    gate_grad_NI, up_grad_NI = gate_NI.new_empty(rows, size), gate_NI.new_empty(rows, size)
    if rows:
        kernel: Any = _backward_kernel[(rows, triton.cdiv(size, BLOCK))]
        tensors = grad_NI, gate_NI, up_NI, gate_grad_NI, up_grad_NI
        kernel(*tensors, size, gate_NI.stride(0), up_NI.stride(0), GELU=gelu, BLOCK=BLOCK)
    return gate_grad_NI, up_grad_NI


@gate_gradient.register_fake
def _(grad_NI: Tensor, gate_NI: Tensor, up_NI: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return gate_NI.new_empty(gate_NI.shape), gate_NI.new_empty(gate_NI.shape)


class GatedActivation(torch.autograd.Function):
    """act(gate) * up, computed in float32."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        gate_NI, up_NI = _rows(gate), _rows(up)
        ctx.save_for_backward(gate_NI, up_NI)
        ctx.gelu = gelu
        return gate_rows(gate_NI, up_NI, gelu).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]: the decorator's type loses ctx
        gate_NI, up_NI = ctx.saved_tensors
        grad_NI = grad.reshape(gate_NI.shape).contiguous()
        gate_grad_NI, up_grad_NI = gate_gradient(grad_NI, gate_NI, up_NI, ctx.gelu)
        return gate_grad_NI.view(grad.shape), up_grad_NI.view(grad.shape), None


def _rows(x: Tensor) -> Tensor:
    """Return a tensor of two dimensions whose rows are contiguous, without a copy if it is possible."""
    x_NI = x.flatten(0, -2)
    if x_NI.stride(-1) != 1:
        return x_NI.contiguous()
    return x_NI
