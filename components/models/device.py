"""Compute device of this process, and detection of errors after which the device or the engine is unusable."""

from __future__ import annotations

import os
import sys

import torch

SIGNS_OF_DEATH = ("CUDA out of memory", "DefaultCPUAllocator: can't allocate", "Executor failed", "in memory profiling")
"""Texts of fatal errors without an exception type of their own: vLLM's about its workers, torch's about host memory,
and vLLM's about GPU memory that other processes freed while it started."""


def compute_device() -> torch.device:
    """Return the current GPU if there is one, else the CPU.

    Raises:
        RuntimeError: CUDA_VISIBLE_DEVICES names GPUs, and torch finds none of them. Computing on the CPU instead would
            be hundreds of times slower without any sign of it.
    """
    check_gpus()
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def check_gpus() -> None:
    """Check that torch finds a GPU if CUDA_VISIBLE_DEVICES names one. See `compute_device`."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if shown and shown != "-1" and not torch.cuda.is_available():
        raise RuntimeError(
            f"this process was given the GPU {shown} (CUDA_VISIBLE_DEVICES), and torch {torch.__version__} finds none: "
            f"{_reason_without_gpu()}; mend that, or set CUDA_VISIBLE_DEVICES= (empty) to compute on the CPU"
        )


def peak_gpu_memory() -> dict[str, float]:
    """Return the peak GPU memory of this process so far in GB; empty if it uses no GPU.

    `gpu_memory_gb` is the memory of tensors, `gpu_memory_reserved_gb` the memory that torch has reserved for them.
    """
    if not torch.cuda.is_initialized():
        return {}
    most = {"gpu_memory_gb": torch.cuda.max_memory_allocated()}
    most["gpu_memory_reserved_gb"] = torch.cuda.max_memory_reserved()
    return {name: nbytes / 1e9 for name, nbytes in most.items()}


def _reason_without_gpu() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return "it is a build for CPUs alone; install one for this machine's driver"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the text names a driver that is too old or missing
        return str(error).strip().splitlines()[0]
    return "the driver shows no device"


def is_engine_dead(error: BaseException) -> bool:
    """True if an error makes an engine or its whole process unusable, so that a new process must replace it.

    Such errors are: an accelerator that is out of memory or has failed, a host that is out of memory, and a vLLM engine
    whose processes have died.
    """
    dead: list[type[BaseException]] = [torch.OutOfMemoryError, torch.AcceleratorError, MemoryError]
    vllm = sys.modules.get("vllm.v1.engine.exceptions")
    if vllm is not None:
        dead.append(vllm.EngineDeadError)
    return isinstance(error, tuple(dead)) or any(sign in str(error) for sign in SIGNS_OF_DEATH)
