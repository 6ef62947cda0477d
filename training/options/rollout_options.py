"""Options of generation: sampling, and the rollout engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from components.generate.choice import BASIC_ENGINES, choose_rollout_engine, rollout_config
from components.generate.config import HFRolloutConfig, RolloutConfig, RolloutSetting, SamplingConfig
from components.ranges import Count, CountFromZero, NameOf, Positive, ShareAboveZero
from components.weights.choice import BASIC_CARRIERS
from training.options.placement_options import PlacementOptions
from training.options.schema import Options, of_plugin


@dataclass(kw_only=True)
class RolloutOptions(Options, group="rollout"):
    """Sampling of responses, and the rollout engine."""

    temperature: Positive = 1.0
    """Of the training samples. Log-probabilities are taken at the same temperature."""
    top_p: ShareAboveZero = 1.0
    """Sample from the likeliest tokens whose probabilities reach this sum. Below 1 the engine's distribution is not the
    one that is trained."""
    top_k: CountFromZero = 0
    """Sample from so many likeliest tokens; 0: from all. As top_p otherwise."""
    max_new_tokens: Count = 1024
    """Tokens of a response, at most, the end token included."""
    max_num_seqs: Count = 512
    """Responses that an engine generates at the same time. Changes memory and speed, not tokens."""
    engine: Annotated[str, NameOf("rollout engine", BASIC_ENGINES)] = "auto"
    """Who generates: `vllm`; `hf`, a loop around transformers; or `auto`: vllm where it is installed and faster, on a
    GPU or with a large model. They draw different tokens from the same seed."""
    tensor_parallel: Count = of_plugin("vllm", 1, engine=("auto", "vllm"))
    """vllm: devices of one engine, over which the weights are spread; on a CPU processes. Where roles share GPUs these
    are the devices of as many ranks, on one node."""
    gpu_memory: ShareAboveZero | None = of_plugin("vllm", None, engine=("auto", "vllm"))
    """vllm: share of a GPU's memory for weights and cache. Default: 0.9; where others share the GPU 0.45, and with
    placement.learners_sleep 0.7."""
    cpu_cache_gb: Positive = of_plugin("vllm", 1.0, engine=("auto", "vllm"))
    """vllm: GiB of an engine's key-value cache on a CPU."""
    enforce_eager: bool = of_plugin("vllm", False, engine=("auto", "vllm"))
    """vllm: no CUDA graphs, which are slower to start and faster to run. On a CPU there are none."""
    prefix_caching: bool = of_plugin("vllm", True, engine=("auto", "vllm"))
    """vllm: read the common beginning of prompts once. Changes speed, not tokens."""
    verify_weight_sync: bool = False
    """After each step compare a digest of every weight on both sides."""
    check_engine_every: CountFromZero = of_plugin("engine_check", 50, engine=("auto", "vllm"))
    """vllm: compare log-probabilities of a few sequences by trainer and engine after the first weight sync of every
    engine, and after every so many. A difference that rounding does not explain ends the run. 0: never."""
    weight_sync: Annotated[str, NameOf("weight carrier", BASIC_CARRIERS)] = "auto"
    """How weights get to the engines: `shared_memory`, which those on other nodes read by TCP; past the host, while
    they are gathered, by `ipc`, from a rank to the engine on its GPU, or `broadcast`, by NCCL from rank 0 to all; or
    `auto`: ipc where each rank shares its GPU with an engine, broadcast where engines have GPUs of their own."""
    merge_lora: bool | None = of_plugin("vllm", None, engine=("auto", "vllm"))
    """vllm, with train.lora_rank: true sends the weights with the adapters added to them, false the adapters alone,
    which vLLM adds as it computes. Default: the adapters alone where vLLM can hold them for the model."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if self.engine == "hf" and self.tensor_parallel > 1:
            yield f"rollout.tensor_parallel={self.tensor_parallel}, but hf uses one device; leave it out"

    def chosen(
        self, gpus: int, model_path: str, *temperatures: float, lora_rank: int = 0
    ) -> tuple[RolloutOptions, str]:
        """With the engine filled in that the machine and the model suggest; and a line that says which, and why.

        Args:
            gpus: of a machine.
            model_path: of the policy.
            temperatures: that are sampled at besides its own.
            lora_rank: of the policy's adapters; 0: it has none.

        Raises:
            ValueError: the engine that was asked for cannot be had, or cannot hold adapters.
        """
        name, reason = choose_rollout_engine(self.engine, gpus, model_path, self.temperature, *temperatures)
        engine = f"{name} generates: {reason}"
        if self.tensor_parallel > 1 and name == "hf":
            raise ValueError(
                f"rollout.tensor_parallel={self.tensor_parallel} needs vllm, but {engine}; set rollout.engine=vllm"
            )
        if not lora_rank:
            return replace(self, engine=name), engine
        fault = rollout_config(name).adapters_fault(model_path, lora_rank, self.merge_lora is False)
        if fault and self.merge_lora is False:
            raise ValueError(f"rollout.merge_lora=false: {fault}; leave it out")
        merges = bool(fault) if self.merge_lora is None else self.merge_lora
        sent = "weights with the adapters added" if merges else "the adapters alone"
        because = f", since {fault}" if fault else ""
        return replace(self, engine=name, merge_lora=merges), f"{engine}; it is sent {sent}{because}"

    def sampling(self, seed: int, step: int, temperature: float | None = None) -> SamplingConfig:
        """How the responses of a step are drawn. Evaluations name a temperature of their own, and leave no token
        out.
        """
        narrowed = {"top_p": self.top_p, "top_k": self.top_k} if temperature is None else {}
        return SamplingConfig(
            temperature=self.temperature if temperature is None else temperature,
            max_new_tokens=self.max_new_tokens,
            seed=seed,
            step=step,
            **narrowed,
        )

    def engine_config(
        self, precision: str, max_prompt_tokens: int | None, placement: PlacementOptions, lora_rank: int
    ) -> RolloutConfig:
        """What one engine is made with.

        Args:
            precision: that the policy is trained in.
            max_prompt_tokens: of the longest prompt; None: as the model allows.
            placement: who shares a GPU with it, and who sleeps there.
            lora_rank: of the policy's adapters; 0: it has none.
        """
        setting = RolloutSetting(
            precision=precision,
            max_prompt_tokens=max_prompt_tokens,
            shares_devices=placement.shares_devices,
            learners_sleep=placement.learners_sleep,
            engines_sleep=bool(placement.engines_sleep),
            lora_rank=0 if self.merge_lora else lora_rank,
        )
        # `auto` is made vLLM or hf by `chosen`.
        name = HFRolloutConfig.NAME if self.engine == "auto" else self.engine
        return rollout_config(name).from_options(self, setting)

    def notes(self) -> list[str]:
        """What a user should know of before the run starts."""
        if self.top_p == 1 and not self.top_k:
            return []
        note = (
            f"rollout.top_p={self.top_p} and rollout.top_k={self.top_k} sample from fewer tokens than are trained: the "
            "engine's log-probabilities are not the policy's, and ratios to them mean little; 1 and 0 agree"
        )
        return [note]
