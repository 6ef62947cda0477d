"""Which engine generates, and with which attention, where the user leaves it open. Nothing here needs torch or vLLM."""

from __future__ import annotations

import importlib.util
import json
from contextvars import ContextVar
from pathlib import Path
from typing import Any

ROLLOUT_ENGINES = ("auto", "vllm", "hf")
LARGE_BYTES = 100_000_000
"""A model's weight files from which on vLLM is the faster one on a CPU too: see docs/benchmarks.md."""


CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Numbers of an attention head for which vLLM 0.32 has kernels on a CPU."""
is_elsewhere: ContextVar[bool] = ContextVar("is_elsewhere", default=False)
"""What is chosen is for another machine than this one: a package that is not installed here may be there."""
HOLD_ADAPTERS = ("gemma", "gemma2", "gemma3_text", "glm4", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Families (`model_type`) of whose models vLLM 0.32 adds low-rank adapters to every linear layer but the head."""
MOST_LORA_RANK = 512
"""Of adapters that vLLM 0.32 holds."""
COLDEST, HOTTEST = 0.01, 2.0
"""Temperatures that vLLM takes as they are, beside 0; it would raise lower ones, and refuses higher ones."""
_WAYS = {
    "ipc": ("CUDA IPC, from each rank to the engine on its GPU", "a bucket that engines map"),
    "broadcast": ("NCCL, from the policy's rank 0 to all engines at once", "gloo, from rank 0 to all engines at once"),
    "shared_memory": ("shared memory, and TCP to other nodes",) * 2,
}
"""How weights get to the engines, on GPUs and on CPUs."""


def choose_rollout_engine(asked: str, gpus: int, model_path: str, *temperatures: float) -> tuple[str, str]:
    """Which engine generates, and why, in a few words.

    Args:
        asked: "vllm", "hf" or "auto".
        gpus: of a machine.
        model_path: folder, hub name, or the name of a demonstration model that is still to be made.
        temperatures: that will be sampled at.

    Raises:
        ValueError: there is no such engine, or vLLM is asked for and cannot be had.
    """
    if asked not in ROLLOUT_ENGINES:
        raise ValueError(f"rollout engine {asked!r}; use one of {', '.join(ROLLOUT_ENGINES)}")
    installed = _is_there("vllm")
    if asked == "hf":
        return "hf", "as asked for"
    fault = _fault(gpus, Path(model_path).expanduser(), temperatures) if installed else "vLLM is not installed"
    if asked == "vllm":
        if fault:
            remedy = "choose hf" if installed else "run bash scripts/setup.sh vllm, or choose hf"
            raise ValueError(f"the rollout engine vllm cannot be used: {fault}; {remedy}")
        return "vllm", "as asked for"
    if fault:
        return "hf", fault
    if gpus:
        return "vllm", "there is a GPU"
    nbytes = sum(file.stat().st_size for file in Path(model_path).expanduser().glob("*.safetensors"))
    if nbytes >= LARGE_BYTES:
        return "vllm", f"the model has {nbytes / 1e6:,.0f} MB of weights"
    return "hf", "faster for a small model on a CPU"


def choose_weight_sync(asked: str, gpus: int, apart: bool, shares: bool, lora_rank: int) -> tuple[str, str]:
    """How weights get to the engines: "ipc", "broadcast" or "shared_memory"; and why, in a few words.

    Args:
        asked: one of the three, or "auto".
        gpus: of a machine.
        apart: the engines are in other processes than the ranks of the policy.
        shares: each rank of the policy has an engine on its device, in another process.
        lora_rank: of the policy's adapters; 0: it has none.

    Raises:
        ValueError: what is asked for cannot be had.
    """
    faults = {"ipc": "", "broadcast": ""}
    if not shares:
        faults["ipc"] = "the ranks of the policy have no engines beside them, on the same devices"
    if not apart:
        faults["broadcast"] = "the engines are in the processes of the policy"
    elif gpus and shares:
        faults["broadcast"] = "NCCL takes each GPU once, and the engines are on those of the policy"
    if lora_rank:
        faults = dict.fromkeys(faults, "it is for weights without adapters")
    if faults.get(asked):
        raise ValueError(f"rollout.weight_sync={asked}: {faults[asked]}; leave it out")
    automatic = [way for way, fault in faults.items() if gpus and not fault]
    way = asked if asked != "auto" else [*automatic, "shared_memory"][0]
    return way, _WAYS[way][0 if gpus else 1]


def adapters_fault(engine: str, model_path: str, lora_rank: int, asked: bool) -> str:
    """Why low-rank adapters have to be added to the weights before these go to an engine; empty when it does that.

    Args:
        engine: "vllm" or "hf".
        model_path: folder, hub name, or the name of a demonstration model that is still to be made.
        lora_rank: of the adapters.
        asked: the user says that it does, which is believed of a model that is not here yet.
    """
    if engine != "vllm":
        return f"{engine} holds whole weights"
    if lora_rank > MOST_LORA_RANK:
        return f"vLLM holds adapters of rank {MOST_LORA_RANK} at most, not of train.lora_rank={lora_rank}"
    family = _text_config(Path(model_path).expanduser()).get("model_type")
    if family is None:
        return "" if asked else "the type of the model is not known before it is loaded"
    return "" if family in HOLD_ADAPTERS else f"vLLM is not known to hold those of a model of type {family}"


def choose_attention(asked: str | None, gpus: int) -> str | None:
    """The attention kernels to load models with: those asked for, and sdpa in place of flash attention that cannot run
    there; of `auto` flash attention where it can run, else transformers' own choice, which is None.
    """
    if asked == "auto":
        return "flash_attention_2" if gpus and importlib.util.find_spec("flash_attn") is not None else None
    return "sdpa" if attention_note(asked, gpus) else asked


def attention_note(asked: str | None, gpus: int) -> str:
    """Why sdpa is used in place of the attention that is asked for; empty where it is not."""
    if asked is None or not asked.startswith("flash_attention"):
        return ""
    if not gpus:
        return f"attn_implementation={asked} needs a GPU, and there is none: sdpa is used"
    if asked == "flash_attention_2" and not _is_there("flash_attn"):
        return f"attn_implementation={asked} needs the package flash_attn, which is not installed: sdpa is used"
    return ""


def _is_there(package: str) -> bool:
    return is_elsewhere.get() or importlib.util.find_spec(package) is not None


def _fault(gpus: int, model: Path, temperatures: tuple[float, ...]) -> str:
    """Why vLLM cannot sample from this model so; empty when it can."""
    odd = [t for t in temperatures if t != 0 and not COLDEST <= t <= HOTTEST]
    if odd:
        return f"vLLM takes temperatures of 0, or from {COLDEST} to {HOTTEST}, not {odd[0]}"
    return "" if gpus else head_fault(model)


def head_fault(model: Path) -> str:
    """Why vLLM cannot sample from this model on a CPU; empty when it can, or nothing is known of it."""
    config = _text_config(model)
    if not {"hidden_size", "num_attention_heads"} <= config.keys():
        return ""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    sizes = ", ".join(map(str, CPU_HEADS))
    return "" if size in CPU_HEADS else f"on a CPU vLLM has kernels for attention heads of {sizes}, not {size}"


def _text_config(model: Path) -> dict[str, Any]:
    """Of a model's folder; empty where nothing is known of it."""
    if not (model / "config.json").is_file():
        return {}
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return config.get("text_config", config)
    except (ValueError, AttributeError, RecursionError):
        return {}  # the recipe's own checks say what is wrong with it
