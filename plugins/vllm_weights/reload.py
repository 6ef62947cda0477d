"""Corrections of vLLM 0.32's weight reload, which drops some weights without an error.

Legend: `H` attention heads, `h` those of this rank.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_RELOAD_LOGGERS = tuple(f"vllm.model_executor.model_loader.reload.{name}" for name in ("layerwise", "inplace"))
_FAILED = "%s: Failed to load weights"
_NOT_LOADED = "Following weights were not loaded"
"""Messages of these loggers in vLLM 0.32."""
_NOT_SENT = (".e_score_correction_bias", ".W_UK_T", ".W_UV")
"""Parameters of vLLM that are not trained (a buffer in transformers), or are computed from others after each reload."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def loads_in_place(model: nn.Module, is_quantized: bool) -> bool:
    """Return True if vLLM's loader can write weights into a model that is in use.

    A layerwise reload writes each byte twice and runs every loader twice. It is needed where vLLM has changed the
    weights after it loaded them: quantized layers, mixtures of experts, latent attention, attention sinks, and all
    layers on a CPU, whose weights are packed.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if is_quantized or not next(model.parameters()).is_cuda:
        return False
    return has_plain_layers(model, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod), Attention)


def has_plain_layers(model: nn.Module, plain_methods: Collection[type], plain_attention: type) -> bool:
    """Return True if vLLM's GPU kernels use the weights of all layers as its loader writes them.

    Args:
        model: the model.
        plain_methods: classes of `quant_method` that leave weights unchanged on a GPU.
        plain_attention: class of the attention layer that derives nothing from weights.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in plain_methods:
            return False
        if hasattr(module, "process_weights_after_loading") and type(module) is not plain_attention:
            return False
        if hasattr(module, "sinks"):
            return False
    return True


@torch.no_grad()
def load_in_place(model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write weights into a model that is in use, at the same addresses; see `loads_in_place`.

    Raises:
        RuntimeError: vLLM's loader has skipped some parameters.
    """
    loaded = model.load_weights(weights)
    names = {name for name, _ in model.named_parameters()}
    if loaded is not None and (skipped := sorted(names - loaded)):
        raise _not_loaded([f"{', '.join(skipped)} not loaded"])


@contextmanager
def experts_packed(model: nn.Module) -> Iterator[None]:
    """Context manager that packs the experts of each layer reloaded on a CPU, exactly once.

    VLLM's CPU kernel holds experts in a packed layout of the same size. On a reload vLLM skips the packing and copies
    unpacked numbers into the packed tensors. It calls `process_weights_after_loading` once for each layer that was
    loaded, before that copy.
    """
    methods = [] if next(model.parameters()).is_cuda else list(_expert_methods(model))
    for method in methods:
        method.process_weights_after_loading = _and_pack(method)
    try:
        yield
    finally:
        for method in methods:
            del method.process_weights_after_loading


def _expert_methods(model: nn.Module) -> Iterator[Any]:
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and hasattr(layer, "w13_weight"):
            yield method


def _and_pack(method: Any) -> Callable[[nn.Module], None]:
    process = method.process_weights_after_loading

    def process_and_pack(layer: nn.Module) -> None:
        process(layer)
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return process_and_pack


class SinkCopies:
    """Copies attention sinks by hand. VLLM's loader writes them past `weight_loader`, into a tensor on the meta device,
    so that a reload drops them.
    """

    def __init__(self, model: nn.Module) -> None:
        with_sinks = ((_layer(name), module) for name, module in model.named_modules() if hasattr(module, "sinks"))
        self.modules = {layer: module for layer, module in with_sinks if isinstance(module.sinks, nn.Parameter)}
        """Attention modules with sinks, by number of the layer."""
        self._copies: dict[int, Tensor] = {}

    def noted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights, and keep a copy of the sinks among them."""
        for name, tensor in weights:
            if self.modules and name.endswith(".sinks"):
                self._copies[_layer(name)] = tensor.clone()
            yield name, tensor

    def copy(self, tp_rank: int) -> None:
        """Write the copies into the layers.

        Args:
            tp_rank: rank among the parts of the engine, each of which has a slice of the heads.
        """
        for layer, sinks_H in self._copies.items():
            sinks_h: Any = self.modules[layer].sinks
            sinks_h.data.copy_(sinks_H.narrow(0, tp_rank * len(sinks_h), len(sinks_h)))


def _layer(name: str) -> int:
    """Number of the layer that the name of a module or of a weight contains, or -1."""
    match = _LAYER.search(name)
    return int(match[1]) if match else -1


class _Records(logging.Handler):
    """Keeps the records of a logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def complete_reload(model: nn.Module, copied: Collection[nn.Module]) -> Iterator[None]:
    """Context manager that reads vLLM's warnings about weights that a reload did not load, for any logging level, and
    raises an error at the end if there are any.

    Args:
        model: the model that is reloaded.
        copied: modules whose weights are written without vLLM's loader.

    Raises:
        RuntimeError: some weights were not loaded, and the model has the old ones.
    """
    excused = Counter(type(module).__name__ for module in _without_weights(model, copied))
    handler = _Records()
    loggers = [logging.getLogger(name) for name in _RELOAD_LOGGERS]
    levels = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
    arguments: list[tuple[str, Any]] = [(str(each.msg), next(iter(each.args or [""]))) for each in handler.records]
    failed = Counter(str(argument) for message, argument in arguments if message == _FAILED)
    unloaded = [argument for message, argument in arguments if message.startswith(_NOT_LOADED)]
    names = sorted({name for each in unloaded for name in each if not name.endswith(_NOT_SENT)})
    missing = [f"{', '.join(names)} not loaded"] if names else []
    if classes := sorted((failed - excused).elements()):
        missing.append(f"no weight was loaded into modules of the classes {', '.join(classes)}")
    if missing:
        raise _not_loaded(missing)


def _not_loaded(missing: list[str]) -> RuntimeError:
    return RuntimeError(
        f"vLLM kept old weights where it was sent new ones: {'; '.join(missing)}. Its loader of this model cannot "
        "be used for weight sync; set rollout.engine=hf"
    )


def _without_weights(model: nn.Module, copied: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Modules that a reload need not load: without parameters, with the parameters of another module (a tied head),
    with no token of the vocabulary, or copied separately.
    """
    holders = Counter(id(tensor) for module in model.modules() for tensor in module._parameters.values())
    for module in model.modules():
        tensors = [tensor for tensor in module._parameters.values() if tensor is not None]
        # With tensor parallelism the last ranks may hold only the padding of a small vocabulary.
        shard = getattr(module, "shard_indices", None)
        is_padding = shard is not None and shard.num_org_elements == 0
        if module in copied or is_padding or all(holders[id(tensor)] > 1 for tensor in tensors):
            yield module
