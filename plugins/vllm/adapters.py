"""Low-rank adapters in a vLLM engine, which keeps its weights and adds the adapters as it computes.

So they alone travel after a step. An engine has them from its start, with B at 0, so that a request that begins before
the first version comes continues with it.
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
"""vLLM's own number for the policy's adapters, of which there is one set."""


def adapter_arguments(rank: int) -> dict[str, Any]:
    """Arguments of vLLM for an engine that holds adapters of this rank; none for 0.

    Raises:
        ValueError: the rank is higher than vLLM takes.
    """
    if not rank:
        return {}
    if rank > MOST_LORA_RANK:
        raise ValueError(f"lora_rank={rank}: vLLM holds {MOST_LORA_RANK} at most; set rollout.merge_lora=true")
    from vllm.config.lora import MaxLoRARanks

    held = min(possible for possible in get_args(MaxLoRARanks) if possible >= rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": held}


def adapter_request(folder: str = "at the start", *, reload: bool = False) -> Any:
    """VLLM's `LoRARequest`: what every request names, and what loads adapters from a folder."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", _ID, folder, load_inplace=reload)


@contextmanager
def arrived(handle: WeightHandle, with_digests: bool) -> Iterator[tuple[Any, dict[str, str]]]:
    """A version of adapters as vLLM loads it; with digests: that of each tensor of it."""
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
    """Adapters that add nothing, as vLLM loads them.

    Args:
        parameters: names and shapes of the model, as `RolloutEngine._parameters` gives them.
        rank: of the adapters.

    Raises:
        ValueError: the model has no layer that adapters could be put into.
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
