"""What the two vLLM engines share: the environment they start in, their settings, and requests.

On a CPU three traps of vLLM 0.32 are kept out. Without a size its key-value cache takes all memory. It prefills long
queues of prompts in chunks, which ends a request with a seed of its own, so chunks are off there. And one process per
core of a machine is bound to a core by NUMA node, which fails where there is one node, so cores are dealt out here.

Legend: `B` sequences, `K` most new tokens.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from components.batch import Batch
from components.generate.config import SamplingConfig
from components.generate.engine import Completions, limits
from components.generate.sampling import request_seeds
from components.models.device import compute_device
from components.models.disk.checkpoint_layout import meta_model
from components.models.gpu_share import free_share, gpu_memory
from components.registry import find, module_of
from components.weights.publisher import WeightHandle
from plugins.vllm.adapters import adapter_arguments
from plugins.vllm.config import VLLMRolloutConfig, load_fault

BINDING, OUR_BINDING = "VLLM_CPU_OMP_THREADS_BIND", "TROUPE_VLLM_THREADS_BIND"
"""Which cores vLLM takes, and what we have set that to."""
BATCHED_TOKENS = 16384
"""Prompt tokens that are read at the same time; on a CPU at least."""


def prepare_process(config: VLLMRolloutConfig, in_process: bool) -> None:
    """Set what vLLM reads from the environment when it is imported. What the user has set stays, but for where the
    engine runs.

    Raises:
        ValueError: vLLM is not installed, or there are fewer cores than processes of the engine.
        RuntimeError: it was given a GPU that torch does not find.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed; run bash scripts/setup.sh vllm, or choose the engine hf")
    compute_device()
    for name, value in {
        # On a CPU it warns of what is set here on purpose.
        "VLLM_LOGGING_LEVEL": "WARNING" if torch.cuda.is_available() else "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Its workers are started anew: a fork of a process with threads may hang.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    if not torch.cuda.is_available() and os.environ.get(BINDING) in (None, os.environ.get(OUR_BINDING)):
        # Another engine may have been here before; what the user has set stays.
        os.environ[BINDING] = os.environ[OUR_BINDING] = _cores(config.tensor_parallel_size)


def _cores(processes: int) -> str:
    """Who is bound to which cores, as vLLM wants it: alone an engine goes where there is room."""
    if processes == 1:
        return "nobind"
    own = sorted(os.sched_getaffinity(0))
    if len(own) < processes:
        raise ValueError(
            f"tensor_parallel_size={processes}, but this process may use {len(own)} CPU cores, one for each part of an "
            f"engine; set at most {len(own)}"
        )
    share = len(own) // processes
    return "|".join(",".join(map(str, own[i * share : (i + 1) * share])) for i in range(processes))


def engine_arguments(model_path: str | Path, config: VLLMRolloutConfig, on_gpu: bool | None = None) -> dict[str, Any]:
    """Keyword arguments of vLLM's `LLM` and `AsyncEngineArgs`.

    Args:
        model_path: folder or hub name of the model.
        config: of the engine.
        on_gpu: it samples there. Default: where there is one.
    """
    length = positions_of(model_path, config)
    arguments: dict[str, Any] = {
        "model": str(model_path),
        "dtype": config.dtype,
        "max_model_len": length,
        "max_num_seqs": config.max_num_seqs,
        "enable_prefix_caching": config.enable_prefix_caching,
        "tensor_parallel_size": config.tensor_parallel_size,
        # In an actor of Ray vLLM would ask Ray for its processes, which have places of ours.
        "distributed_executor_backend": "mp" if config.tensor_parallel_size > 1 else None,
        # Those of the distribution that was drawn from: at the temperature.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{module_of('vllm receiver', 'weights')}.WeightReceiver",
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "seed": 0,
        **adapter_arguments(config.lora_rank),
    }
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    # VLLM would say it at the first prompt, or never.
    if fault := load_fault(model_config(model_path), on_gpu):
        raise ValueError(f"{model_path} cannot be sampled from: {fault}; choose the engine hf")
    if on_gpu:
        asked, parts = config.gpu_memory_utilization, config.tensor_parallel_size
        return arguments | {
            "max_num_batched_tokens": max(BATCHED_TOKENS, config.max_num_seqs),
            "enforce_eager": config.enforce_eager,
            "gpu_memory_utilization": free_share(asked, lambda: gpu_memory(parts)),
            "enable_sleep_mode": config.enable_sleep,
        }
    return arguments | {
        # Without chunks the longest prompt is read as a whole.
        "max_num_batched_tokens": max(BATCHED_TOKENS, length or 0, config.max_num_seqs),
        "enable_chunked_prefill": False,
        # Compiling takes minutes on a CPU and makes nothing faster.
        "enforce_eager": True,
        "kv_cache_memory_bytes": int(config.cpu_cache_gb * 2**30),
    }


def model_config(model_path: str | Path) -> dict[str, Any]:
    """Return the configuration of the language model in a folder or on the hub."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_path).get_text_config().to_dict()


def positions_of(model_path: str | Path, config: VLLMRolloutConfig) -> int | None:
    """Tokens of prompt and completion together: as asked for, and no more than the model has positions for."""
    known: int | None = model_config(model_path).get("max_position_embeddings")
    asked = config.max_model_len
    return min(known, asked) if known and asked else known or asked


def parameters_of(model_path: str | Path) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return the parameters of the model as transformers has it; see `RolloutEngine._parameters`."""
    named = meta_model(str(model_path)).named_parameters(remove_duplicate=False)
    return {name: (id(tensor), tuple(tensor.shape)) for name, tensor in named}


def parts_to_wake(for_weights: bool, awake: set[str]) -> list[str]:
    """What of an engine that sleeps is to wake, of which some may be awake: each part wakes once."""
    return sorted(({"weights"} if for_weights else {"weights", "kv_cache"}) - awake)


def same_digests(parts: list[dict[str, str]]) -> dict[str, str]:
    """What all parts of an engine were given; a part that was given something else has none of it right."""
    return {name: found if all(part.get(name) == found for part in parts) else "" for name, found in parts[0].items()}


def sampling_parameters(
    sampling: SamplingConfig, seed: int | None, max_tokens: int, end_tokens: Sequence[int] = ()
) -> Any:
    """VLLM's `SamplingParams` of one request.

    Args:
        sampling: how to draw.
        seed: of this request; greedy ones need none.
        max_tokens: of this request.
        end_tokens: that end it, beside those that vLLM finds in the model's generation_config.json.
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
        detokenize=False,
    )


def scoring_parameters() -> Any:
    """Return vLLM's `SamplingParams` of a request for the log-probabilities of its prompt."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)


def prompt_scores(output: Any) -> list[float]:
    """Log-probability of each token but the first of the prompt of a `RequestOutput`."""
    tokens = output.prompt_token_ids[1:]
    return [entry[token].logprob for token, entry in zip(tokens, output.prompt_logprobs[1:], strict=True)]


def scored_rows(handle: WeightHandle, positions: int | None) -> list[list[int]]:
    """Return the sequences of a version's probe, of which an engine with few positions takes the first tokens."""
    # One token is drawn after the sequence, though it is not used.
    return [row[: (positions or len(row) + 1) - 1] for row in handle.probe.tokens]


def sent_bytes(handle: WeightHandle) -> bytes:
    """Pickle a handle for vLLM's processes, which accept no objects of ours. They need no probe."""
    return pickle.dumps(replace(handle, probe=None))


def open_check(config: VLLMRolloutConfig) -> Any:
    """Return the check of an engine, or None where there is none."""
    kind = find("engine check", config.NAME) if config.check_every else None
    return kind and kind(config.check_every, config.dtype)


def requests(prompts: Batch, sampling: SamplingConfig, end_tokens: Sequence[int] = ()) -> tuple[list[Any], list[Any]]:
    """Prompts as vLLM takes them, and how each is continued; see `sampling_parameters` for `end_tokens`."""
    seeds = request_seeds(
        sampling.seed, sampling.step, prompts["prompt_id"], prompts["sample_id"], position_B=prompts.lengths
    )
    rows = [{"prompt_token_ids": tokens} for tokens in prompts.lists("tokens")]
    limit_B = limits(prompts, sampling).tolist()
    parameters = [
        sampling_parameters(sampling, int(seed), limit, end_tokens) for seed, limit in zip(seeds, limit_B, strict=True)
    ]
    return rows, parameters


def drawn_logprobs(output: Any) -> list[float]:
    """Log-probability of each token of a `CompletionOutput`."""
    return [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]


def completions(outputs: list[Any], max_new_tokens: int) -> Completions:
    """What vLLM has drawn, one `CompletionOutput` per prompt."""
    rows = [(list(output.token_ids), drawn_logprobs(output)) for output in outputs]
    length_B = torch.tensor([len(tokens) for tokens, _ in rows], dtype=torch.int64)

    def padded(columns: list[list[Any]], dtype: torch.dtype) -> Tensor:
        x_BK = torch.zeros(len(rows), max_new_tokens, dtype=dtype)
        inside_BK = torch.arange(max_new_tokens) < length_B[:, None]
        x_BK[inside_BK] = torch.tensor([value for column in columns for value in column], dtype=dtype)
        return x_BK

    return Completions(
        tokens_BK=padded([tokens for tokens, _ in rows], torch.int64),
        logprob_BK=padded([logprobs for _, logprobs in rows], torch.float32),
        length_B=length_B,
        ended_B=torch.tensor([output.finish_reason == "stop" for output in outputs], dtype=torch.bool),
    )
