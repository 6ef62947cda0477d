"""How much of what a GPU can do training uses (MFU), and what it draws."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

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
"""Dense bfloat16 operations per second, as the maker states them; the first that the device's name contains counts."""


def peak_flops(device_name: str) -> float | None:
    """Of a device, by the name that its driver gives; None: it is not known here."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)


def training_flops(model: nn.Module, length_B: Tensor) -> float | None:
    """Operations of the forward and backward pass of sequences, without those that checkpointing repeats.

    6 per parameter and token, 4 where a parameter is not trained; what only looks tokens up counts nothing. Causal
    attention: forward two products of 2 * width * length / 2 operations per layer and token, backward twice as many.

    Args:
        model: whole, or partitioned by FSDP or DeepSpeed; policy or value model, perhaps with adapters.
        length_B: tokens of each sequence.

    Returns:
        None where they are not known: each token of a mixture of experts goes through a part of the model.
    """
    base: Any = getattr(model, "backbone", model)
    config = base.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_attention_heads", None)
    if layers is None or heads is None or any("expert" in name for name, _ in model.named_modules()):
        return None
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    head = base.get_output_embeddings()
    embedding = base.get_input_embeddings().weight
    is_tied = head is not None and head.weight is embedding
    per_token = sum(
        getattr(parameter, "ds_numel", parameter.numel()) * (6 if parameter.requires_grad else 4)
        for parameter in model.parameters()
        if parameter is not embedding or is_tied
    )
    return float(per_token * length_B.sum() + 6 * layers * width * length_B.square().sum())


def gpu_use(model: nn.Module, length_B: Tensor, seconds: float, gpus: int) -> dict[str, float]:
    """`tokens_per_second_and_gpu` of a training step, `mfu` where the GPU and the model are known, and `gpu_power_w` at
    its end where NVML knows it.

    Args:
        model: as for `training_flops`.
        length_B: tokens of each sequence that all GPUs together trained on.
        seconds: that it took.
        gpus: how many.
    """
    found = {"tokens_per_second_and_gpu": float(length_B.sum()) / seconds / gpus}
    flops, peak = training_flops(model, length_B), peak_flops(torch.cuda.get_device_name())
    if flops is not None and peak is not None:
        found["mfu"] = flops / seconds / gpus / peak
    watts = power_watts()
    return found if watts is None else found | {"gpu_power_w": watts}


def power_watts() -> float | None:
    """What this process's GPU draws, averaged by NVML over a second or less; None: nvidia-ml-py is not installed, or
    NVML does not know, as of a part of a GPU.
    """
    if importlib.util.find_spec("pynvml") is None:
        return None
    nvml: Any = importlib.import_module("pynvml")
    try:
        return torch.cuda.power_draw() / 1e3
    except (RuntimeError, nvml.NVMLError):
        return None
