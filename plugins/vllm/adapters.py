"""Low-rank adapters in a vLLM engine, which keeps the base weights and applies the adapters at run time.

Only the adapters are sent to the engine after a step. The engine starts with adapters whose B is 0, so that a request
that starts before the first weight version arrives continues with that version.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from components.weights.digest import digest
from components.weights.publisher import WeightHandle, read_weights
from plugins.vllm.config import MOST_LORA_RANK

_ID = 1
"""Id of the policy's adapters in vLLM. There is only one set."""


def adapter_arguments(rank: int) -> dict[str, Any]:
    """Return the arguments of vLLM for an engine with adapters of this rank. Empty for rank 0.

    Raises:
        ValueError: the rank is higher than vLLM supports.
    """
    if not rank:
        return {}
    if rank > MOST_LORA_RANK:
        raise ValueError(f"lora_rank={rank}: vLLM holds {MOST_LORA_RANK} at most; set rollout.merge_lora=true")
    from vllm.config.lora import MaxLoRARanks

    held = min(possible for possible in get_args(MaxLoRARanks) if possible >= rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": held}


def adapter_request(folder: str = "at the start", *, reload: bool = False) -> Any:
    """Return vLLM's `LoRARequest`. Every generation request carries it, and it loads adapters from a folder."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", _ID, folder, load_inplace=reload)


@contextmanager
def arrived(handle: WeightHandle, with_digests: bool) -> Iterator[tuple[Any, dict[str, str]]]:
    """Write a version of the adapters to a folder for vLLM; yield the request that loads it, and the tensors' digests.

    Args:
        handle: handle of the published version.
        with_digests: compute the digest of each tensor. Otherwise the mapping of digests is empty.
    """
    digests: dict[str, str] = {}

    def arriving() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_weights(handle):
            if with_digests:
                digests[name] = digest(tensor)
            yield name, tensor

    with _folder(arriving(), handle.adapter_scale) as request:
        yield request, digests


@contextmanager
def no_change(parameters: dict[str, tuple[int, tuple[int, ...]]], rank: int) -> Iterator[Any]:
    """Write adapters that change nothing (B is 0) to a folder for vLLM; yield the request that loads them.

    Args:
        parameters: names and shapes of the model's parameters, as `RolloutEngine._parameters` returns them.
        rank: rank of the adapters.

    Raises:
        ValueError: the model has no linear layer for adapters.
    """
    layers = [(name, shape) for name, (_, shape) in parameters.items() if ".layers.0." in name and len(shape) == 2]
    if not layers:
        raise ValueError(
            f"no linear layer is found in the model's first (names with .layers.0.) among {', '.join(parameters)[:200]}"
            ": vLLM cannot hold its adapters; leave rollout.merge_lora=false out"
        )
    name, (outputs, inputs) = layers[0]
    prefix = "base_model.model." + name.removesuffix(".weight")
    tensors = {f"{prefix}.lora_A.weight": (rank, inputs), f"{prefix}.lora_B.weight": (outputs, rank)}
    with _folder(((name, torch.zeros(shape)) for name, shape in tensors.items()), scale=1.0) as request:
        yield request


@contextmanager
def _folder(tensors: Iterable[tuple[str, Tensor]], scale: float) -> Iterator[Any]:
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="adapters-") as folder:
        written = dict(tensors)
        save_file(written, Path(folder, "adapter_model.safetensors"))
        layers = sorted({name.removeprefix("base_model.model.").partition(".lora_")[0] for name in written})
        rank = next(len(tensor) for name, tensor in written.items() if ".lora_A." in name)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "target_modules": layers}
        Path(folder, "adapter_config.json").write_text(json.dumps(config))
        yield adapter_request(folder, reload=True)
