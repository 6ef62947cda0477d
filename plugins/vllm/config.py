"""Configuration of a vLLM engine, and the models and temperatures that vLLM supports. Needs neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from components.generate.choice import text_config
from components.generate.config import RolloutConfig, RolloutSetting
from components.generate.paged_config import PagedRolloutConfig
from components.ranges import CountFromZero, Range
from components.registry import find
from components.train.config import product_type

if TYPE_CHECKING:
    from training.options.rollout_options import RolloutOptions

LARGE_BYTES = 100_000_000
"""Total size of a model's weight files from which vLLM is faster than hf on a CPU too; see docs/benchmarks.md."""
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head for which vLLM 0.32 has CPU kernels."""
CPU_LATENT = 576
"""Size of a latent key (`kv_lora_rank` + `qk_rope_head_dim`) for which vLLM 0.32 has a CPU kernel."""
HOLD_ADAPTERS = ("gemma", "gemma2", "gemma3_text", "glm4", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Model families (`model_type`) for which vLLM 0.32 applies low-rank adapters to all linear layers except the head."""
MOST_LORA_RANK = 512
"""Maximum rank of adapters in vLLM 0.32."""
FORMATS = ("float32", "bfloat16", "fp8_per_channel", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Number formats of an engine, from the finest to the coarsest."""
VLLM_MIN_TEMPERATURE, VLLM_MAX_TEMPERATURE = 0.01, 2.0
"""Range of temperatures, besides 0, that vLLM uses unchanged. It raises lower ones to the minimum and rejects higher
ones."""


@dataclass(frozen=True, kw_only=True)
class VLLMRolloutConfig(PagedRolloutConfig):
    """A vLLM engine."""

    NAME: ClassVar[str] = "vllm"
    TITLE: ClassVar[str] = "vLLM"
    PACKAGE: ClassVar[str] = "vllm"
    INSTALL: ClassVar[str] = "bash scripts/setup.sh vllm"

    max_model_len: Annotated[int, Range(least=2)] | None = None
    """Maximum number of tokens of prompt and completion together. Default: number of positions of the model."""
    enable_prefix_caching: bool = True
    """Compute the common prefix of prompts once. Changes the speed, not the tokens."""
    check_every: CountFromZero = 0
    """Interval, in weight versions, of the engine check, which also runs on the first version. 0 disables it."""

    returns_routes: bool = False
    """Return the experts of each token, as columns of the rollouts. Needs a GPU."""
    precision: str = ""
    """Coarsest number format of the trainer, the engine and its key-value cache, one of FORMATS. It sets the limit of
    the engine check. Default: `dtype`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further engine arguments, which replace those that the engine sets. The plug-in vllm_arguments checks them."""

    @classmethod
    def from_options(cls, options: RolloutOptions, setting: RolloutSetting) -> VLLMRolloutConfig:
        """See `RolloutConfig.from_options`."""
        arguments = {name: value for name, value in options.vllm.items() if name != "dtype" and value != "auto"}
        trained, dtype = product_type(setting.precision), options.vllm.get("dtype", "auto")
        dtype = trained if dtype == "auto" else dtype
        formats = {trained, dtype, *map(arguments.get, ("kv_cache_dtype", "quantization"))}
        # Not 0.9: a sleeping role keeps its CUDA context on the GPU, and a reference model keeps its weights there.
        shared = 0.7 if setting.learners_sleep else 0.45
        longest = setting.max_prompt_tokens
        return cls(
            dtype=dtype,
            max_num_seqs=options.max_num_seqs or RolloutConfig.max_num_seqs,
            max_model_len=None if longest is None else longest + options.max_new_tokens,
            tensor_parallel_size=options.tensor_parallel,
            gpu_memory_utilization=options.gpu_memory or (shared if setting.shares_devices else 0.9),
            cpu_cache_gb=options.cpu_cache_gb,
            enforce_eager=options.enforce_eager,
            own_process=options.own_process,
            enable_prefix_caching=options.prefix_caching,
            enable_sleep=setting.engines_sleep,
            lora_rank=setting.lora_rank,
            check_every=options.check_engine_every,
            returns_routes=options.routing_replay == "engine",
            precision=max(formats.intersection(FORMATS), key=FORMATS.index),
            arguments=arguments,
        )

    @classmethod
    def fault(cls, gpus: int, model_path: str, temperatures: tuple[float, ...]) -> str:
        """See `RolloutConfig.fault`."""
        odd = [t for t in temperatures if t != 0 and not VLLM_MIN_TEMPERATURE <= t <= VLLM_MAX_TEMPERATURE]
        if odd:
            return (
                f"vLLM takes temperatures of 0, or from {VLLM_MIN_TEMPERATURE} to {VLLM_MAX_TEMPERATURE}, not {odd[0]}"
            )
        return load_fault(text_config(Path(model_path).expanduser()), bool(gpus))

    @classmethod
    def advantage(cls, gpus: int, model_path: str) -> str:
        """See `RolloutConfig.advantage`."""
        if gpus:
            return "there is a GPU"
        nbytes = sum(file.stat().st_size for file in Path(model_path).expanduser().glob("*.safetensors"))
        return f"the model has {nbytes / 1e6:,.0f} MB of weights" if nbytes >= LARGE_BYTES else ""

    @classmethod
    def adapters_fault(cls, model_path: str, lora_rank: int, is_requested: bool) -> str:
        """See `RolloutConfig.adapters_fault`."""
        if lora_rank > MOST_LORA_RANK:
            return f"vLLM holds adapters of rank {MOST_LORA_RANK} at most, not of train.lora_rank={lora_rank}"
        family = text_config(Path(model_path).expanduser()).get("model_type")
        if family is None:
            return "" if is_requested else "the type of the model is not known before it is loaded"
        return "" if family in HOLD_ADAPTERS else f"vLLM is not known to hold those of a model of type {family}"


def load_fault(config: Mapping[str, Any], on_gpu: bool) -> str:
    """Return why vLLM cannot sample from a model or receive its weights. Empty if it can, or if that is unknown.

    Args:
        config: content of the model's config.json, or the part that describes the language model.
        on_gpu: the engine runs on a GPU.
    """
    sync_fault = find("vllm families", "weights")
    if sync_fault is None:
        return "the plug-in vllm_weights, which loads weights into vLLM, is missing"
    return sync_fault(config, on_gpu) or ("" if on_gpu else head_fault(config))


def head_fault(config: Mapping[str, Any]) -> str:
    """Return why vLLM cannot sample from a model on a CPU. Empty if it can, or if that is unknown."""
    if not {"hidden_size", "num_attention_heads"} <= config.keys():
        return ""
    if rank := config.get("kv_lora_rank"):
        latent = rank + (config.get("qk_rope_head_dim") or 0)
        return "" if latent == CPU_LATENT else f"on a CPU vLLM has a kernel for latents of {CPU_LATENT}, not {latent}"
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return "" if size in CPU_HEADS else f"on a CPU vLLM has kernels for heads of {str(CPU_HEADS)[1:-1]}, not {size}"
