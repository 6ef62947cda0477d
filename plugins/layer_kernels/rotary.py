"""Rotary position embedding that reads and writes queries or keys once (Su et al. 2021,
https://arxiv.org/abs/2104.09864). The halves of a head are rotated as in transformers.

Legend: `B` sequences, `H` heads, `T` tokens, `D` size of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


@triton.jit
def _kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    result: tl.tensor,
    heads: tl.tensor,
    half: tl.tensor,
    x_batch: tl.tensor,
    x_head: tl.tensor,
    x_token: tl.tensor,
    result_batch: tl.tensor,
    result_head: tl.tensor,
    result_token: tl.tensor,
    angle_batch: tl.tensor,
    angle_token: tl.tensor,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, HALF)
    angle = batch * angle_batch + token * angle_token + lane
    is_lane = lane < half
    first_cos = tl.load(cos + angle, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    last_cos = tl.load(cos + angle + half, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + angle, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    last_sin = tl.load(sin + angle + half, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    # Heads may be 2^31 and more numbers apart in total: 64 heads of 128 numbers with 262,144 tokens.
    head = tl.arange(0, HEADS).to(tl.int64)
    inside = (head < heads)[:, None] & is_lane[None, :]
    source = x + batch * x_batch + token * x_token + head[:, None] * x_head + lane[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    last = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    target = result + batch * result_batch + token * result_token + head[:, None] * result_head + lane[None, :]
    if BACKWARD:
        tl.store(target, first * first_cos + last * last_sin, mask=inside)
        tl.store(target + half, last * last_cos - first * first_sin, mask=inside)
    else:
        tl.store(target, first * first_cos - last * first_sin, mask=inside)
        tl.store(target + half, last * last_cos + first * last_sin, mask=inside)


@torch.library.custom_op("troupe::rotate", mutates_args=())
def rotate(x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, dtype: torch.dtype, backward: bool) -> Tensor:
    """Rotate queries or keys, or with `backward` the gradients of the rotated ones.

    Args:
        x_BHTD: [B, H, T, D] with contiguous heads, in any order of the other dimensions.
        cos_BTD: [B, T, D] cosines. The heads are contiguous.
        sin_BTD: [B, T, D] sines with the same strides.
        dtype: dtype of the result.
        backward: apply the transposed rotation.

    Returns:
        [B, H, T, D] with the memory layout of the argument.
    """
    result_BHTD = torch.empty_like(x_BHTD, dtype=dtype)
    batch, heads, tokens, size = x_BHTD.shape
    if x_BHTD.numel():
        half = size // 2
        kernel: Any = _kernel[(tokens, batch)]
        strides = (*x_BHTD.stride()[:3], *result_BHTD.stride()[:3], *cos_BTD.stride()[:2])
        blocks = {"HEADS": 1 << (heads - 1).bit_length(), "HALF": 1 << (half - 1).bit_length()}
        kernel(x_BHTD, cos_BTD, sin_BTD, result_BHTD, heads, half, *strides, BACKWARD=backward, **blocks)
    return result_BHTD


@rotate.register_fake
def _(x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, dtype: torch.dtype, backward: bool) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x_BHTD, dtype=dtype)


class Rotation(torch.autograd.Function):
    """Rotary position embedding of queries or keys, computed in float32."""

    @staticmethod
    def forward(ctx: Any, x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BTD, sin_BTD)
        ctx.dtype = x_BHTD.dtype
        return rotate(_dense(x_BHTD), cos_BTD, sin_BTD, torch.promote_types(x_BHTD.dtype, cos_BTD.dtype), False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]: the decorator's type loses ctx
        return rotate(_dense(grad_BHTD), *ctx.saved_tensors, ctx.dtype, True), None, None


def _dense(x: Tensor) -> Tensor:
    """Return a tensor whose heads are contiguous."""
    if x.stride(-1) != 1:
        return x.contiguous()
    return x


def apply_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, *, plain: Any
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, as `apply_rotary_pos_emb` of a model of transformers does.

    Args:
        q: [B, H, T, D] queries.
        k: [B, K, T, D] keys of K heads.
        cos: [B or 1, T, D] cosines.
        sin: [B or 1, T, D] sines.
        unsqueeze_dim: dimension of the heads.
        plain: the model's own function, for any other shapes.
    """
    if unsqueeze_dim != 1 or cos.dim() != 3 or cos.shape[-1] != q.shape[-1] or q.shape[-1] % 2 or cos.requires_grad:
        return plain(q, k, cos, sin, unsqueeze_dim)
    shape = q.shape[0], q.shape[2], q.shape[3]
    cos_BTD, sin_BTD = (x.contiguous().expand(shape) for x in (cos, sin))
    return Rotation.apply(q, cos_BTD, sin_BTD), Rotation.apply(k, cos_BTD, sin_BTD)
