"""Code shared by the two vLLM engines: environment variables, engine arguments, and conversion of requests.

It avoids three problems of vLLM 0.32 on a CPU:

- Without a configured size the KV cache takes all memory.
- Long queues of prompts are prefilled in chunks, which ends a request that has its own seed. Chunked prefill is off.
- vLLM binds processes to cores by NUMA node, which fails on a machine with one node. Cores are assigned here instead.

Legend: `B` sequences, `K` maximum number of new tokens.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from components.batch import Batch
from components.generate.config import SamplingConfig
from components.generate.engine import Completions, limits
from components.generate.sampling import request_seeds
from components.models.device import check_gpus
from components.models.disk.meta_model import meta_model
from components.models.gpu_share import free_share, gpu_memory
from components.registry import find, module_of
from plugins.vllm.adapters import adapter_arguments
from plugins.vllm.config import VLLMRolloutConfig, load_fault

_log = logging.getLogger(__name__)

BINDING, OUR_BINDING = "VLLM_CPU_OMP_THREADS_BIND", "TROUPE_VLLM_THREADS_BIND"
"""Environment variable with the cores that vLLM uses, and the one that records the value set here."""
BATCHED_TOKENS = 16384
"""Number of prompt tokens that are prefilled at the same time. On a CPU this is the minimum."""
CAPTURED_ROWS = 512
"""Maximum number of rows of the CUDA graphs that vLLM captures by default."""


def prepare_process(config: VLLMRolloutConfig, in_process: bool) -> None:
    """Set the environment variables that vLLM reads on import. Values set by the user are kept, except the one that
    selects the engine's process.

    Raises:
        ValueError: vLLM is not installed, or the engine has more processes than there are cores.
        RuntimeError: this process was assigned a GPU that torch cannot use.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed; run bash scripts/setup.sh vllm, or choose the engine hf")
    # Without `compute_device`, which would create a CUDA context of 0.5 GB beside those of vLLM's processes.
    check_gpus()
    for name, value in {
        # On a CPU vLLM warns about settings that are intended here.
        "VLLM_LOGGING_LEVEL": "WARNING" if torch.cuda.is_available() else "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # A forked process with threads may hang.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    if not torch.cuda.is_available() and os.environ.get(BINDING) in (None, os.environ.get(OUR_BINDING)):
        # A value equal to OUR_BINDING was set for an earlier engine of this process and is replaced. Any other value
        # was set by the user and is kept.
        os.environ[BINDING] = os.environ[OUR_BINDING] = _cores(config.tensor_parallel_size)


def _cores(processes: int) -> str:
    """Return the cores of each process in vLLM's format. A single process is not bound."""
    if processes == 1:
        return "nobind"
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < processes:
        raise ValueError(
            f"tensor_parallel_size={processes}, but this process may use {len(cores)} CPU cores, one for each part of "
            f"an engine; set at most {len(cores)}"
        )
    share = len(cores) // processes
    return "|".join(",".join(map(str, cores[i * share : (i + 1) * share])) for i in range(processes))


def engine_arguments(model_path: str | Path, config: VLLMRolloutConfig, on_gpu: bool | None = None) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's `LLM` and `AsyncEngineArgs`.

    Args:
        model_path: folder or hub name of the model.
        config: configuration of the engine.
        on_gpu: the engine runs on a GPU. Default: True if a GPU is available.

    Raises:
        ValueError: vLLM cannot sample from the model, or cannot receive its weights.
    """
    length = positions_of(model_path, config)
    arguments: dict[str, Any] = {
        "model": str(model_path),
        "dtype": config.dtype,
        "max_model_len": length,
        "max_num_seqs": config.max_num_seqs,
        "enable_prefix_caching": config.enable_prefix_caching,
        "tensor_parallel_size": config.tensor_parallel_size,
        # In a Ray actor vLLM would start its processes through Ray, which conflicts with this job's placement.
        "distributed_executor_backend": "mp" if config.tensor_parallel_size > 1 else None,
        # Log-probabilities of the distribution that tokens are sampled from, after the temperature is applied.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{module_of('vllm receiver', 'weights')}.WeightReceiver",
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "seed": 0,
        **adapter_arguments(config.lora_rank),
    }
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    # vLLM would fail at the first prompt, or return wrong log-probabilities without an error.
    if fault := load_fault(model_config(model_path), on_gpu):
        raise ValueError(f"{model_path} cannot be sampled from: {fault}; choose the engine hf")
    if on_gpu:
        chosen = {
            "max_num_batched_tokens": max(BATCHED_TOKENS, config.max_num_seqs),
            "enforce_eager": config.enforce_eager,
            # By default vLLM runs larger steps without CUDA graphs. None selects its default.
            "max_cudagraph_capture_size": config.max_num_seqs if config.max_num_seqs > CAPTURED_ROWS else None,
            "gpu_memory_utilization": free_share(
                config.gpu_memory_utilization, lambda: gpu_memory(config.tensor_parallel_size)
            ),
            "enable_sleep_mode": config.enable_sleep,
            "enable_return_routed_experts": config.returns_routes,
        }
    else:
        chosen = {
            # Without chunked prefill the longest prompt has to fit into one batch.
            "max_num_batched_tokens": max(BATCHED_TOKENS, length or 0, config.max_num_seqs),
            "enable_chunked_prefill": False,
            # Compilation takes minutes on a CPU and gives no speed-up.
            "enforce_eager": True,
            "kv_cache_memory_bytes": int(config.cpu_cache_gb * 2**30),
        }
    return arguments | chosen | dict(config.arguments)


def log_model_runner(vllm_config: Any) -> None:
    """Log the model runner of a started engine. On a GPU V1 is a warning, since it is slower."""
    runner = "V2" if vllm_config.use_v2_model_runner else "V1"
    _log.info("vLLM runs the model with model runner %s", runner)
    if runner == "V1" and torch.cuda.is_available():
        # V1 draws the token of each seeded request with a kernel of its own: 5 ms per decode step at 512 requests.
        _log.warning("vLLM uses model runner V1, which samples slowly with seeds; unset VLLM_USE_V2_MODEL_RUNNER")


def model_config(model_path: str | Path) -> dict[str, Any]:
    """Return the configuration of the language model in a folder or on the hub."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_path).get_text_config().to_dict()


def positions_of(model_path: str | Path, config: VLLMRolloutConfig) -> int | None:
    """Return the maximum number of tokens of prompt and completion together: the smaller of `max_model_len` and the
    model's number of positions, or None if neither is known.
    """
    positions: Any = model_config(model_path).get("max_position_embeddings")
    return min(filter(None, (positions, config.max_model_len)), default=None)


def parameters_of(model_path: str | Path) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return the parameters of the model as transformers has it; see `RolloutEngine._parameters`."""
    named = meta_model(str(model_path)).named_parameters(remove_duplicate=False)
    return {name: (id(tensor), tuple(tensor.shape)) for name, tensor in named}


def parts_to_wake(for_weights: bool, awake: set[str]) -> list[str]:
    """Return the parts of a sleeping engine to wake, without those that are awake already.

    Args:
        for_weights: wake the weights only, not the KV cache.
        awake: parts that are awake.
    """
    return sorted(({"weights"} if for_weights else {"weights", "kv_cache"}) - awake)


def same_digests(parts: list[dict[str, str]]) -> dict[str, str]:
    """Return the digests that all tensor-parallel parts of an engine report. If parts differ, the digest is ""."""
    return {name: value if all(part.get(name) == value for part in parts) else "" for name, value in parts[0].items()}


def sampling_parameters(
    sampling: SamplingConfig, seed: int | None, max_tokens: int, end_tokens: Sequence[int] = ()
) -> Any:
    """Return vLLM's `SamplingParams` of one request.

    Args:
        sampling: sampling configuration.
        seed: seed of this request. Ignored for greedy sampling.
        max_tokens: maximum number of new tokens of this request.
        end_tokens: ids of tokens that end the response, in addition to those in the model's generation_config.json.
    """
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p if sampling.temperature else 1.0,
        top_k=sampling.top_k if sampling.temperature else 0,
        seed=seed if sampling.temperature else None,
        max_tokens=max_tokens,
        stop_token_ids=list(end_tokens),
        logprobs=0,
        # One list per response instead of a dict and an object per token.
        flat_logprobs=True,
        detokenize=False,
    )


def open_check(config: VLLMRolloutConfig) -> Any:
    """Return the check of an engine, or None if it is disabled."""
    kind = find("engine check", config.NAME) if config.check_every else None
    return kind and kind(config.check_every, config.precision or config.dtype)


def requests(prompts: Batch, sampling: SamplingConfig, end_tokens: Sequence[int] = ()) -> tuple[list[Any], list[Any]]:
    """Return vLLM's prompts and `SamplingParams` of a batch. See `sampling_parameters` for `end_tokens`."""
    seeds = request_seeds(
        sampling.seed, sampling.step, prompts["prompt_id"], prompts["sample_id"], position_B=prompts.lengths
    )
    limit_B = limits(prompts, sampling).tolist()
    parameters = [
        sampling_parameters(sampling, int(seed), limit, end_tokens) for seed, limit in zip(seeds, limit_B, strict=True)
    ]
    return [{"prompt_token_ids": tokens} for tokens in prompts.lists("tokens")], parameters


def drawn_logprobs(output: Any) -> list[float]:
    """Return the log-probability of each token of a `CompletionOutput`."""
    values: list[float] = output.logprobs.logprobs  # one for each token
    assert len(values) == len(output.token_ids), (len(values), len(output.token_ids))
    return values


def completions(outputs: list[Any], max_new_tokens: int) -> Completions:
    """Convert vLLM's outputs, one `CompletionOutput` per prompt, to `Completions`."""
    length_B = torch.tensor([len(output.token_ids) for output in outputs], dtype=torch.int64)
    total = int(length_B.sum())
    inside_BK = torch.arange(max_new_tokens) < length_B[:, None]

    def padded(columns: Iterable[Sequence[Any]], dtype: type[np.generic]) -> Tensor:
        # NumPy reads lists of numbers several times as fast as torch.
        values_N = torch.from_numpy(np.fromiter(chain.from_iterable(columns), dtype, total))
        x_BK = torch.zeros(len(outputs), max_new_tokens, dtype=values_N.dtype)
        x_BK[inside_BK] = values_N
        return x_BK

    return Completions(
        tokens_BK=padded((output.token_ids for output in outputs), np.int64),
        logprob_BK=padded(map(drawn_logprobs, outputs), np.float32),
        length_B=length_B,
        ended_B=torch.tensor([output.finish_reason == "stop" for output in outputs], dtype=torch.bool),
    )
