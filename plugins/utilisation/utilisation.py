"""Utilisation of GPUs in training: model FLOPs utilisation (MFU), tokens per second, and power."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from components.models.packing.layout import ComputedTokens

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
}
"""Peak dense bfloat16 operations per second by the manufacturer's data. The first key that the device's name contains
applies."""


def peak_flops(device_name: str) -> float | None:
    """Return the peak operations per second of a device by the name that its driver reports, or None if it is
    unknown.
    """
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)


def training_flops(model: nn.Module, computed: ComputedTokens) -> float | None:
    """Return the number of operations of a forward and backward pass, without recomputation by gradient checkpointing.

    A parameter counts 6 operations per token, or 4 if it is not trained. An embedding that is only looked up counts 0.
    Causal attention counts two products of 2 * width * pairs / 2 operations per layer in the forward pass, and twice as
    many in the backward pass.

    Args:
        model: policy or value model, whole or sharded by FSDP or DeepSpeed, with or without adapters.
        computed: number of tokens, and sum of queries times keys.

    Returns:
        The number of operations, or None for a mixture of experts, where each token passes through a part of the model.
    """
    base: Any = getattr(model, "backbone", model)
    config = base.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_attention_heads", None)
    if layers is None or heads is None or any("expert" in name for name, _ in model.named_modules()):
        return None
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    head = base.get_output_embeddings()
    embedding = base.get_input_embeddings().weight
    # A tied embedding is also the matrix of the output layer, so it counts.
    is_tied = head is not None and head.weight is embedding
    per_token = 0
    for parameter in model.parameters():
        if parameter is not embedding or is_tied:
            # DeepSpeed leaves a sharded parameter empty, and keeps its number of elements in `ds_numel`.
            size = getattr(parameter, "ds_numel", parameter.numel())
            per_token += size * (6 if parameter.requires_grad else 4)
    return float(per_token * computed.places + 6 * layers * heads * head_size * computed.pairs)


def gpu_use(
    model: nn.Module, length_B: Tensor, computed: ComputedTokens, seconds: float, gpus: int
) -> dict[str, float]:
    """Return the speed of a training step on GPUs.

    Args:
        model: as for `training_flops`.
        length_B: [B] number of tokens of each sequence that all GPUs together trained on.
        computed: number of tokens that they computed. It is lower if sequences share a prompt, and higher with padding.
        seconds: wall time of the step.
        gpus: number of GPUs.

    Returns:
        Metrics: `tokens_per_second_and_gpu` of `length_B`; `mfu` of the computed tokens and `effective_mfu` of the
        operations that separate sequences of `length_B` would take, if GPU and model are known; `gpu_power_w` at the
        end of the step, if NVML reports it.
    """
    metrics = {"tokens_per_second_and_gpu": float(length_B.sum()) / seconds / gpus}
    separate = ComputedTokens(int(length_B.sum()), int(length_B.square().sum()))
    peak = peak_flops(torch.cuda.get_device_name())
    for name, tokens in (("mfu", computed), ("effective_mfu", separate)):
        flops = training_flops(model, tokens)
        if flops is not None and peak is not None:
            metrics[name] = flops / seconds / gpus / peak
    watts = power_watts()
    if watts is not None:
        metrics["gpu_power_w"] = watts
    return metrics


def power_watts() -> float | None:
    """Return the power of this process's GPU in watts, averaged by NVML over a second or less.

    Returns:
        None if nvidia-ml-py is not installed or NVML does not report the power, as for a slice of a GPU (MIG).
    """
    if importlib.util.find_spec("pynvml") is None:
        return None
    nvml: Any = importlib.import_module("pynvml")
    try:
        return torch.cuda.power_draw() / 1e3
    except (RuntimeError, nvml.NVMLError):
        return None
