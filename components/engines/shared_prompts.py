"""Log-probabilities of answers, where several answers to one prompt are trained on together: each prompt is read once.

What is computed for a prompt depends on nothing behind it, so its keys and values serve all of its answers, and their
gradients meet in it. Measured on CPU, 64 prompts of 6 tokens with 8 answers each, forward and backward: a third less
time for answers of 6 tokens, a fifth less for 16.

Legend: `B` sequences, `N` all tokens of the batch end to end, `U` different beginnings, `S` longest of them, `T`
longest of the rests, `M` tokens that are predicted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad

from components.batch import Batch
from components.engines.causal import TokenOutput, token_logprobs
from components.engines.logprobs import label_logprobs

# Two passes cost more than one over as many tokens: they have to save at least this share.
_LEAST_SAVING = 0.1


def answer_logprobs(
    model: nn.Module, batch: Batch, temperature: float = 1.0, with_entropy: bool = False
) -> TokenOutput:
    """`token_logprobs` of all tokens from the first one of an answer on; 0 for the tokens of prompts, or what they are.

    The numbers are the same up to float32's rounding. One pass over everything is made instead where that is cheaper,
    and where two would not do: parameters that ranks hold parts of, recomputed activations, layers whose cache is more
    than keys and values, modules that are not transformers' own. On a GPU, where masked rows have other kernels, it is
    always one.

    Args:
        model: causal language model, or an engine around one; gradients flow where they are enabled.
        batch: with columns `tokens` and `action_mask`, one micro-batch.
        temperature: as for `token_logprobs`.
        with_entropy: as for `token_logprobs`.
    """
    cache = _plain_cache(model)
    if cache is None or not len(batch):
        return token_logprobs(model, batch, temperature, with_entropy)
    # The last token of a prompt predicts the first of its answer, and so counts as one of the rest.
    shared_B = _first_actions(batch).sub(1).clamp(min=0)
    rest_B = batch.lengths - shared_B
    begin = _cut(batch, torch.zeros_like(shared_B), shared_B)
    # Padding is told from token 0 by -1.
    tokens_US, place_B = begin.padded("tokens", -1, side="left").to(torch.int64).unique(dim=0, return_inverse=True)
    # The last token predicts nothing.
    width, longest = int(rest_B.max()) - 1, int(batch.lengths.max()) - 1
    cost = tokens_US.numel() + len(batch) * width
    if not tokens_US.shape[1] or width < 1 or cost > (1 - _LEAST_SAVING) * len(batch) * longest:
        return token_logprobs(model, batch, temperature, with_entropy)
    rest = _cut(batch, shared_B, rest_B)
    tokens_BT = rest.padded("tokens", 0)[:, :width]
    position_BT = shared_B[:, None] + torch.arange(width, device=shared_B.device)
    # Padding gets positions that the model has.
    position_BT = torch.minimum(position_BT, batch.lengths[:, None] - 1)
    logits_BTV = _two_passes(model, cache, tokens_US, place_B, tokens_BT, position_BT)
    # Each token of a rest but its first is predicted from the place before it.
    follower_M = (rest["position"] > 0).nonzero().squeeze(1)
    state_M = rest.sequence_ids[follower_M] * width + rest["position"][follower_M] - 1
    label_M = rest["tokens"][follower_M].to(torch.int64)
    found = label_logprobs(logits_BTV.flatten(0, 1), state_M, label_M, temperature or 1.0, with_entropy)
    place_M = rest["place"][follower_M]
    logprob_N, entropy_N = (
        None if x_M is None else x_M.new_zeros(batch.num_tokens).index_copy(0, place_M, x_M) for x_M in found
    )
    assert logprob_N is not None
    return TokenOutput(logprob_N, entropy_N)


def _plain_cache(model: Any) -> Any:
    """An empty cache, or None where the model's passes cannot be cut in two."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    inner = getattr(model, "module", model)
    recomputes = inner.training and getattr(inner, "is_gradient_checkpointing", False)
    if recomputes or not hasattr(inner, "config"):
        return None
    # Where parameters are gathered for each pass, all ranks must make equally many, and one before each backward pass.
    gathers = any(isinstance(module, FSDPModule) for module in inner.modules())
    if gathers or any(hasattr(parameter, "ds_id") or parameter.is_cuda for parameter in inner.parameters()):
        return None
    cache = DynamicCache(config=inner.config)
    return cache if cache.layers and all(type(layer) is DynamicLayer for layer in cache.layers) else None


def _first_actions(batch: Batch) -> Tensor:
    """[B] place of the first token of the answer; the last place where there is none."""
    position_N = _positions(batch)
    after_N = torch.where(batch["action_mask"], position_N, batch.num_tokens)
    first_B = torch.full_like(batch.lengths, batch.num_tokens).scatter_reduce(0, batch.sequence_ids, after_N, "amin")
    return torch.minimum(first_B, batch.lengths - 1)


def _positions(batch: Batch) -> Tensor:
    """[N] place of each token in its sequence."""
    places_N = torch.arange(batch.num_tokens, device=batch.lengths.device)
    return places_N - batch.offsets[batch.sequence_ids]


def _cut(batch: Batch, start_B: Tensor, length_B: Tensor) -> Batch:
    """A part of each sequence: `tokens`, their `position` in it, and their `place` among the N."""
    position_N = _positions(batch)
    start_N, length_N = start_B[batch.sequence_ids], length_B[batch.sequence_ids]
    place = ((position_N >= start_N) & (position_N < start_N + length_N)).nonzero().squeeze(1)
    columns = {"tokens": batch["tokens"][place], "position": (position_N - start_N)[place], "place": place}
    return Batch(length_B, columns)


def _two_passes(
    model: Any, cache: Any, tokens_US: Tensor, place_B: Tensor, tokens_BT: Tensor, position_BT: Tensor
) -> Tensor:
    """[B, T, V] logits of the rests."""
    real_US = tokens_US >= 0
    padded = not bool(real_US.all())
    model(
        input_ids=tokens_US.clamp(min=0),
        attention_mask=real_US.long() if padded else None,
        position_ids=(real_US.cumsum(1) - 1).clamp(min=0) if padded else None,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    for layer in cache.layers:
        layer.keys, layer.values = (x.index_select(0, place_B) for x in (layer.keys, layer.values))
    width = tokens_BT.shape[1]
    mask_BS = pad(real_US[place_B].long(), (0, width), value=1) if padded else None
    return model(
        input_ids=tokens_BT,
        attention_mask=mask_BS,
        position_ids=position_BT,
        past_key_values=cache,
        use_cache=True,
    ).logits
