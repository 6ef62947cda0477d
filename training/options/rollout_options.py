"""Options of generation: sampling, and the rollout engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from components.generate.choice import BASIC_ENGINES, choose_rollout_engine, rollout_config
from components.generate.config import HFRolloutConfig, RolloutConfig, RolloutSetting, SamplingConfig
from components.ranges import Count, CountFromZero, NameOf, Positive, ShareAboveZero
from components.registry import load, require
from components.weights.choice import BASIC_CARRIERS
from components.weights.verification import OPTION, VERIFICATION
from training.options.placement_options import PlacementOptions
from training.options.schema import PLUGIN, Options, errors_of, of_plugin


@dataclass(kw_only=True)
class RolloutOptions(Options, group="rollout"):
    """Sampling of responses, and the rollout engine."""

    temperature: Positive = 1.0
    """Sampling temperature during training. Log-probabilities are computed at the same temperature."""
    top_p: ShareAboveZero = 1.0
    """Top-p: sample from the most likely tokens whose probabilities sum to this value. 1 samples from the full
    vocabulary. Below 1, the engine's distribution differs from the distribution that is trained."""
    top_k: CountFromZero = 0
    """Top-k: sample from this number of most likely tokens. 0 samples from the full vocabulary. Above 0, the engine's
    distribution differs from the distribution that is trained."""
    max_new_tokens: Count = 1024
    """Maximum number of tokens of a response, including the end token."""
    max_num_seqs: Count | None = None
    """Maximum number of responses that an engine generates concurrently. Affects memory and speed, not tokens. Default:
    512; on GPUs 512 to 2048 by the size of the model, or fewer if the key-value cache does not fit in memory."""
    engine: Annotated[str, NameOf("rollout engine", BASIC_ENGINES)] = "auto"
    """Generation engine. `vllm`; `hf`, which uses transformers; `auto` selects vLLM if it is installed and expected to
    be faster, that is, on a GPU or with a large model. The two sample different tokens from the same seed."""
    tensor_parallel: Count = of_plugin("vllm", 1, engine=("auto", "vllm"))
    """vllm: tensor-parallel degree, the number of devices (on a CPU, processes) that share the weights of one engine.
    With shared GPUs, an engine uses the GPUs of this number of ranks on one node."""
    gpu_memory: ShareAboveZero | None = of_plugin("vllm", None, engine=("auto", "vllm"))
    """vllm: share of GPU memory for weights and key-value cache. Default: 0.9; with shared GPUs the share that the
    weights and max_num_seqs responses of maximum length need. If the sizes of model or GPU are not known, 0.45, or 0.7
    with placement.learners_sleep."""
    cpu_cache_gb: Positive = of_plugin("vllm", 1.0, engine=("auto", "vllm"))
    """vllm: size of an engine's key-value cache on a CPU, in GiB."""
    enforce_eager: bool = of_plugin("vllm", False, engine=("auto", "vllm"))
    """vllm: disable CUDA graphs. They make start-up slower and generation faster. No effect on a CPU."""
    own_process: bool = of_plugin("vllm", False, engine=("auto", "vllm"))
    """vllm: run the core of each engine in a process of its own, so that work on requests and outputs overlaps with
    the steps of the model. Needs a further CPU core and 1 GB of host memory per engine. Affects speed, not tokens."""
    prefix_caching: bool = of_plugin("vllm", True, engine=("auto", "vllm"))
    """vllm: compute the common prefix of prompts once and cache it. Affects speed, not tokens."""
    verify_weight_sync: bool = False
    """Compare digests of all weights of trainer and engines after each step."""
    check_engine_every: CountFromZero = of_plugin("engine_check", 50, engine=("auto", "vllm"))
    """vllm: interval, in weight syncs, of comparisons of the log-probabilities of a few sequences by trainer and
    engine. The first sync of each engine is always checked. A difference above rounding errors stops the run. 0
    disables it."""
    weight_sync: Annotated[str, NameOf("weight carrier", BASIC_CARRIERS)] = "auto"
    """Transport of weights to the engines. `shared_memory`: host memory, read by TCP from other nodes. `ipc`: CUDA IPC
    from a rank to the engine on its GPU. `broadcast`: NCCL from rank 0 to all engines. The last two copy while weights
    are gathered, without host memory. `auto`: ipc if each rank shares its GPU with an engine, broadcast if engines have
    separate GPUs."""
    vllm: dict[str, Any] = field(default_factory=dict, metadata={PLUGIN: "vllm_arguments"})
    """vllm: further engine arguments, as rollout.vllm.block_size=32. Values are YAML. docs/engines.md lists those that
    are passed on, and the reasons against the others."""
    accept_bias: bool = of_plugin("vllm_arguments", False, engine=("auto", "vllm"))
    """vllm: accept arguments in rollout.vllm that make the engine's log-probabilities differ from the trainer's, with
    algorithm.correction=none. Gradients are then biased."""
    routing_replay: Annotated[str, NameOf("routing replay", ("off",))] = of_plugin("routing_replay", "off")
    """Mixtures of experts: experts of each token in training. `off`: those that the router chooses in the training
    pass. `policy`: those of the pass for the old log-probabilities. `engine`: those of the rollout, which vllm
    reports on a GPU. The weights of the experts are always computed by the router in training."""
    replay_from: str = of_plugin("replay", "")
    """Folder of a recorded run whose stored rollouts are trained on in place of new ones. scripts/replay.sh sets it.
    Default: generate."""
    merge_lora: bool | None = of_plugin("vllm", None, engine=("auto", "vllm"))
    """vllm, with train.lora_rank: true sends the weights with the adapters merged. false sends only the adapters, which
    vLLM applies during generation. Default: false if vLLM supports adapters for the model, else true."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if self.verify_weight_sync:
            yield from errors_of("", require, VERIFICATION, "digests", OPTION)
        if self.engine == "hf" and self.tensor_parallel > 1:
            yield f"rollout.tensor_parallel={self.tensor_parallel}, but the engine hf uses one device; remove it"

    def chosen(
        self, gpus: int, model_path: str, *temperatures: float, lora_rank: int = 0
    ) -> tuple[RolloutOptions, str]:
        """Return the options with the engine resolved, and a sentence with the choice and its reason.

        Args:
            gpus: number of GPUs of a machine.
            model_path: folder of the policy.
            temperatures: further sampling temperatures of the run.
            lora_rank: rank of the adapters of the policy, or 0 without adapters.

        Raises:
            ValueError: the requested engine is not available, or does not support the adapters.
        """
        name, reason = choose_rollout_engine(self.engine, gpus, model_path, self.temperature, *temperatures)
        engine = f"{name} generates: {reason}"
        if self.tensor_parallel > 1 and name == "hf":
            raise ValueError(
                f"rollout.tensor_parallel={self.tensor_parallel} needs vllm, but {engine}; set rollout.engine=vllm"
            )
        resolved = replace(self, engine=name, max_num_seqs=self.max_num_seqs or RolloutConfig.max_num_seqs)
        if self.routing_replay == "engine" and (fault := load("routing replay check", "engine")(name, gpus)):
            raise ValueError(f"rollout.routing_replay=engine: {fault}")
        if not lora_rank:
            return resolved, engine
        fault = rollout_config(name).adapters_fault(model_path, lora_rank, self.merge_lora is False)
        if fault and self.merge_lora is False:
            raise ValueError(f"rollout.merge_lora=false: {fault}; remove it")
        # `false` with a fault was refused above, so it needs no case here.
        merges = bool(self.merge_lora or fault)
        sent = "weights with merged adapters" if merges else "only the adapters"
        because = fault and f", since {fault}"
        return replace(resolved, merge_lora=merges), f"{engine}; it is sent {sent}{because}"

    def sampling(self, seed: int, step: int, temperature: float | None = None) -> SamplingConfig:
        """Return the sampling parameters of a step.

        Args:
            seed: seed of the run.
            step: number of the step.
            temperature: temperature of an evaluation. Default: that of training.
        """
        config = SamplingConfig(temperature=self.temperature, max_new_tokens=self.max_new_tokens, seed=seed, step=step)
        # An evaluation has its own top_p and top_k (evaluation.top_p, evaluation.top_k), which the caller sets.
        if temperature is not None:
            return replace(config, temperature=temperature)
        return replace(config, top_p=self.top_p, top_k=self.top_k)

    def engine_config(
        self, precision: str, max_prompt_tokens: int | None, placement: PlacementOptions, lora_rank: int
    ) -> RolloutConfig:
        """Return the configuration of one engine.

        Args:
            precision: training precision of the policy.
            max_prompt_tokens: maximum length of a prompt, or None for the limit of the model.
            placement: options that determine sharing of GPUs and sleeping.
            lora_rank: rank of the adapters of the policy, or 0 without adapters.
        """
        # The engine gets merged weights as those of a plain model, so it needs no space for adapters.
        if self.merge_lora:
            lora_rank = 0
        setting = RolloutSetting(
            precision=precision,
            max_prompt_tokens=max_prompt_tokens,
            shares_devices=placement.shares_devices,
            learners_sleep=placement.learners_sleep,
            engines_sleep=bool(placement.engines_sleep),
            lora_rank=lora_rank,
        )
        name = self.engine
        # `chosen` has replaced `auto` before a run. A plan may need the configuration earlier, and hf works anywhere.
        if name == "auto":
            name = HFRolloutConfig.NAME
        return rollout_config(name).from_options(self, setting)

    def notes(self) -> list[str]:
        """Return notes for the user before the run starts."""
        if self.top_p == 1 and not self.top_k:
            return []
        note = (
            f"rollout.top_p={self.top_p}, rollout.top_k={self.top_k}: tokens come from a part of the vocabulary, but "
            "the policy's log-probabilities cover all of it, so importance-sampling ratios are biased; set 1 and 0"
        )
        return [note]
