"""Marks of the outputs of layers, for the comparison of two implementations of a model.

A mark is a random projection of a module's output to a few numbers per token. Transformers and vLLM use the same names
for the blocks of a layer.

Legend: `N` tokens, `H` hidden size, `P` size of a mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(\w+)$")
_KINDS = {
    **dict.fromkeys(("self_attn", "attn", "attention", "self_attention"), "attention"),
    **dict.fromkeys(("mlp", "block_sparse_moe", "feed_forward", "ffn", "moe"), "feed-forward block or experts"),
}
_ENDS = {
    "embeddings": re.compile(r"(?:^|\.)(?:embed_tokens|embedding|embed_in|wte)$"),
    "final norm": re.compile(r"^(?:model|transformer|gpt_neox)\.(?:norm|final_layernorm|final_layer_norm|ln_f)$"),
}
_NUMBERS = 4
"""P: size of a mark."""


def group_of(module: str) -> str:
    """Return the group of layers whose output a module returns, such as "layer 3, attention"; empty if it is none.

    Args:
        module: name of a module of a causal model.
    """
    if block := _BLOCK.search(module):
        kind = _KINDS.get(block[2])
        if kind is None:
            return ""
        return f"layer {block[1]}, {kind}"
    return next((group for group, name in _ENDS.items() if name.search(module)), "")


@contextmanager
def marked(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Context manager that collects the marks of all forward passes, [N, P] per pass, by group in the order of
    computation. Modules inside a compiled graph are not included.
    """
    marks: dict[str, list[Tensor]] = {}

    def note(group: str, output: Any) -> None:
        # Decoder layers return a tuple whose first entry is the hidden states.
        states = output
        if isinstance(output, tuple):
            states = output[0]
        marks.setdefault(group, []).append(_mark(states.detach()))

    handles = [
        module.register_forward_hook(lambda _, __, output, group=group: note(group, output))
        for name, module in model.named_modules()
        if (group := group_of(name))
    ]
    try:
        yield marks
    finally:
        for handle in handles:
            handle.remove()


def _mark(states: Tensor) -> Tensor:
    """Return the mark of hidden states, [N, P] float32 on the CPU."""
    size = states.shape[-1]
    # The seed depends only on the size, so that trainer and engine use the same projection.
    projection_HP = torch.randn(size, _NUMBERS, generator=torch.Generator().manual_seed(size)) / size**0.5
    return states.reshape(-1, size).float().cpu() @ projection_HP


def first_difference(expected: dict[str, Tensor], actual: dict[str, Tensor], limit: float) -> str:
    """Return the first group, in the order of computation, whose marks differ by more than a limit, with the relative
    difference; empty if no group does, or no marks can be compared.

    Args:
        expected: marks [N, P] by group.
        actual: marks by group, of the same tokens.
        limit: maximum difference relative to the mean size of the expected marks.
    """
    for group, expected_NP in expected.items():
        actual_NP = actual.get(group)
        if actual_NP is None or actual_NP.shape != expected_NP.shape:
            continue
        difference = float((actual_NP - expected_NP).abs().mean() / expected_NP.abs().mean().clamp(min=1e-30))
        if not difference <= limit:
            return f"{group} (relative difference {difference:.2g})"
    return ""
