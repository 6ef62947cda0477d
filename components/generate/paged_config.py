"""Configuration of engines with a paged key-value cache, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from components.generate.config import RolloutConfig
from components.ranges import Count, OneOf, Positive, ShareAboveZero


@dataclass(frozen=True, kw_only=True)
class PagedRolloutConfig(RolloutConfig):
    """Configuration of an engine that reserves a share of its devices' memory at start-up, for the weights and a paged
    key-value cache.
    """

    dtype: Annotated[str, OneOf(("float32", "bfloat16"))] = "float32"
    """Dtype of the weights and of the key-value cache: "float32" or "bfloat16". Log-probabilities are always
    float32."""
    max_num_seqs: Count = 256
    tensor_parallel_size: Count = 1
    """Tensor-parallel degree: number of GPUs over which the weights of one engine are split. On a CPU: number of
    processes, each with its own core.
    """
    gpu_memory_utilization: ShareAboveZero = 0.9
    """Share of a GPU's memory for the weights and the cache. Unused on a CPU."""
    cpu_cache_gb: Positive = 1.0
    """Size of the key-value cache on a CPU, in GiB. Unused on a GPU."""
    enforce_eager: bool = False
    """Run kernels one by one instead of in CUDA graphs: slower, with a faster start. Always the case on a CPU."""
    enable_sleep: bool = False
    """Allow the engine to free its GPU memory between generations. On a CPU nothing is freed."""
    own_process: bool = False
    """Run the engine in a child process. Otherwise it runs in this process, if it uses a single device."""

    @property
    def weights_dtype(self) -> str:
        return self.dtype
