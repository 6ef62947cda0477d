"""Where this process computes, and which errors leave its device or its engine of no use."""

from __future__ import annotations

import os
import sys

import torch

SIGNS_OF_DEATH = ("CUDA out of memory", "DefaultCPUAllocator: can't allocate", "Executor failed", "in memory profiling")
"""In errors that have no type of their own: vLLM's about its parts, torch's about host memory, and vLLM's where others
gave memory of the GPU back while it started."""


def compute_device() -> torch.device:
    """The current GPU if there is one, else the CPU.

    Raises:
        RuntimeError: CUDA_VISIBLE_DEVICES shows this process GPUs, and torch finds none of them. It would compute on
            the CPU, hundreds of times slower, and nobody would know.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if shown and shown != "-1":
        raise RuntimeError(
            f"this process was given the GPU {shown} (CUDA_VISIBLE_DEVICES), and torch {torch.__version__} finds none: "
            f"{_why_none()}; mend that, or set CUDA_VISIBLE_DEVICES= (empty) to compute on the CPU"
        )
    return torch.device("cpu")


def peak_gpu_memory() -> dict[str, float]:
    """`gpu_memory_gb` and `gpu_memory_reserved_gb`: the most that the tensors of this process have taken so far, and
    torch for them; nothing where it uses no GPU.
    """
    if not torch.cuda.is_initialized():
        return {}
    most = {"gpu_memory_gb": torch.cuda.max_memory_allocated()}
    most["gpu_memory_reserved_gb"] = torch.cuda.max_memory_reserved()
    return {name: nbytes / 1e9 for name, nbytes in most.items()}


def _why_none() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return "it is a build for CPUs alone; install one for this machine's driver"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # a driver that is too old or not there, says the text
        return str(error).strip().splitlines()[0]
    return "the driver shows no device"


def is_engine_dead(error: BaseException) -> bool:
    """Whether an engine, or the whole process, can do nothing more after an error, while a new process could.

    An accelerator without memory or after an error of its own, a host without memory, and a vLLM whose own processes
    have died.
    """
    dead: list[type[BaseException]] = [torch.OutOfMemoryError, torch.AcceleratorError, MemoryError]
    vllm = sys.modules.get("vllm.v1.engine.exceptions")
    if vllm is not None:
        dead.append(vllm.EngineDeadError)
    return isinstance(error, tuple(dead)) or any(sign in str(error) for sign in SIGNS_OF_DEATH)
