"""Tensor parallelism: each layer is split over several ranks, by transformers' plan of the model.

A column-wise layer computes a part of the outputs on each rank. A row-wise layer takes a part of the inputs, and an
all-reduce sums the results (Shoeybi et al. 2019, "Megatron-LM"). In between, in attention, each rank has a subset of
the heads. Embedding and output layer are split by vocabulary. Between layers all ranks have the same states.

Parameters become DTensors over the ranks, which `fully_shard` shards further by rows. Modules compute with plain
tensors: this rank's parts.

Legend: `T` ranks, `K` key heads, `D` size of a head, `V` vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from components.models.vocabulary import set_vocabulary
from plugins.parallel.vocabulary import CopiedVocabulary, VocabularyPart, local_shards, summed

_COLUMNS = "colwise"
_ROWS = "rowwise"
_EACH_HEAD = "replicated_with_grad_allreduce"
"""Styles in transformers' plans. Embedding and output layer are identified without the plan."""
_KEYS = ("k_proj", "v_proj")


def cut_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers of `model` over the ranks of a mesh with one axis, in place.

    If the number of ranks does not divide the number of key heads, each rank computes all of them and uses those of its
    query heads. If it does not divide the vocabulary, each rank computes all logits.

    Args:
        model: policy or value model, on any device, including the meta device.
        mesh: mesh of the tensor axis.

    Raises:
        ValueError: the model has no plan, its plan has unsupported styles, or the ranks do not divide its sizes.
    """
    inner: Any = getattr(model, "backbone", model)
    cuts = _Cuts(inner, mesh)
    for name, module in inner.named_modules():
        cuts.decide(name, module)
    for module in model.modules():
        if module not in cuts.forward and any(True for _ in module.parameters(recurse=False)):
            cuts.forward[module] = _forward_unsplit
    _distribute(model, mesh, cuts.placement)
    for module, forward in cuts.forward.items():
        module.forward = partial(forward, module, module.forward, mesh.get_group())


class _Cuts:
    """Placement and forward function of each module."""

    def __init__(self, model: Any, mesh: DeviceMesh) -> None:
        self._model = model
        self._size = mesh.size()
        self._group = mesh.get_group()
        self._text: Any = model.config.get_text_config()
        self._plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self.placement: dict[nn.Parameter, Placement] = {}
        """Placements of sharded parameters. All others are replicated."""
        self.forward: dict[nn.Module, Callable[..., Tensor]] = {}
        """New forward function of each module: (module, original forward, group, ...) -> output."""
        self._given = f"parallel.tensor={self._size}"
        self._check()

    def _check(self) -> None:
        names = {plan_name(name) for name, _ in [*self._model.named_modules(), *self._model.named_parameters()]}
        used = {name: style for name, style in self._plan.items() if name in names}
        layers = {name: style for name, style in used.items() if "layers." in name}
        if not layers:
            raise ValueError(
                f"{self._given} cuts layers by the plan of transformers, which has none for "
                f"{type(self._model).__name__}; set parallel.tensor=1"
            )
        odd = {name: style for name, style in layers.items() if style not in (_COLUMNS, _ROWS, _EACH_HEAD)}
        if odd:
            name, style = next(iter(odd.items()))
            raise ValueError(
                f"{self._given} cuts dense layers, and the plan of {type(self._model).__name__} has {name}: {style}, "
                "of experts or of layers that are several in one; set parallel.tensor=1"
            )
        self._divide("attention heads", self._text.num_attention_heads)

    def _divide(self, what: str, count: int) -> None:
        if count % self._size:
            raise ValueError(
                f"{self._given} does not divide the {count} {what} of {type(self._model).__name__}, which the ranks "
                "share; set a divisor"
            )

    def decide(self, name: str, module: Any) -> None:
        """Record the placement and the forward function of a module that is split."""
        style = self._plan.get(plan_name(name))
        if module is self._embedding or module is self._head:
            self._by_vocabulary(module)
        elif style == _EACH_HEAD:
            self.forward[module] = _each_head
        elif style == _ROWS:
            self._divide(f"inputs of {name}", module.in_features)
            self.forward[module] = _rows
            self.placement[module.weight] = Shard(1)
        elif style == _COLUMNS and name.endswith(_KEYS) and self._key_heads % self._size:
            self._repeat_keys(name, module)
        elif style == _COLUMNS:
            self._divide(f"outputs of {name}", module.out_features)
            self.forward[module] = _columns
            self.placement |= dict.fromkeys(module.parameters(recurse=False), Shard(0))

    @property
    def _key_heads(self) -> int:
        return getattr(self._text, "num_key_value_heads", None) or self._text.num_attention_heads

    def _repeat_keys(self, name: str, module: Any) -> None:
        """Compute all key heads on each rank, and repeat them so that each rank selects those of its query heads."""
        together = math.lcm(self._key_heads, self._size)
        self.forward[module] = partial(_key_heads, heads=self._key_heads, repeats=together // self._key_heads)
        attention: Any = self._model.get_submodule(name.rpartition(".")[0])
        attention.num_key_value_groups = self._text.num_attention_heads // together

    def _by_vocabulary(self, module: Any) -> None:
        tokens = len(module.weight)
        heads = [layer for layer in (self._embedding, self._head) if layer is not None]
        # Both layers are split, or neither: models with tied embeddings have one weight for the two.
        if any(len(layer.weight) % self._size for layer in heads):
            if module is self._head:
                set_vocabulary(module, CopiedVocabulary())
            return
        size = tokens // self._size
        part = VocabularyPart(self._group, self._group.rank() * size, size)
        self.placement |= dict.fromkeys(module.parameters(recurse=False), Shard(0))
        if module is self._head:
            set_vocabulary(module, part)
            self.forward[module] = _head
            return
        if module.padding_idx is not None:
            place = module.padding_idx - part.first
            # torch rejects an index outside of this rank's rows. The rank of the padding token keeps it.
            module.padding_idx = None
            if 0 <= place < size:
                module.padding_idx = place
        self.forward[module] = partial(_embedding, part=part)


def plan_name(name: str) -> str:
    """Return the name of a module in transformers' plans, which have a star in place of the layer number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _distribute(model: nn.Module, mesh: DeviceMesh, placement: dict[nn.Parameter, Placement]) -> None:
    """Convert all parameters to DTensors. Parameters that modules share stay shared."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module, name))
    for parameter, where in places.items():
        cut = placement.get(parameter, Replicate())
        cut_parameter = distribute_tensor(parameter.detach(), mesh, [cut], src_data_rank=None)
        made = nn.Parameter(cut_parameter, parameter.requires_grad)
        for module, name in where:
            setattr(module, name, made)


def _forward_unsplit(module: nn.Module, forward: Any, _group: dist.ProcessGroup, *inputs: Any, **named: Any) -> Tensor:
    with local_shards(module):
        return forward(*inputs, **named)


def _each_head(module: nn.Module, forward: Any, _group: dist.ProcessGroup, *inputs: Any, **named: Any) -> Tensor:
    with local_shards(module, partial_gradients=True):
        return forward(*inputs, **named)


def _columns(module: nn.Module, forward: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    with local_shards(module):
        return forward(_Spread.apply(x, group))


def _rows(module: Any, forward: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    with local_shards(module):
        bias = module.bias
        # The bias is added after the sum. Otherwise it would count once per rank.
        module._parameters["bias"] = None
        output = _Sum.apply(forward(x), group)
    if bias is None:
        return output
    return output + bias


def _key_heads(
    module: nn.Module, forward: Any, group: dist.ProcessGroup, x: Tensor, *, heads: int, repeats: int
) -> Tensor:
    with local_shards(module, partial_gradients=True):
        x_KD = forward(_Spread.apply(x, group)).unflatten(-1, (heads, -1))
    return x_KD.repeat_interleave(repeats, -2).chunk(group.size(), -2)[group.rank()].flatten(-2)


def _embedding(
    module: nn.Module, forward: Any, group: dist.ProcessGroup, token: Tensor, *, part: VocabularyPart
) -> Tensor:
    place, is_own = part.local(token)
    with local_shards(module):
        return _Sum.apply(forward(place).masked_fill(~is_own.unsqueeze(-1), 0.0), group)


def _head(module: nn.Module, forward: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    with local_shards(module):
        return _Gather.apply(forward(_Spread.apply(x, group)), group)


class _Spread(torch.autograd.Function):
    """Identity on a replicated tensor that each rank uses differently. The backward pass sums the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return summed(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """All-reduce (sum). All ranks use the result in the same way, so each summand has the gradient of the sum."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


class _Gather(torch.autograd.Function):
    """All-gather of the last dimension to [..., V].

    All ranks use the result in the same way, so the backward pass keeps this rank's part of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.size = x.shape[-1]
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.narrow(-1, ctx.group.rank() * ctx.size, ctx.size), None
