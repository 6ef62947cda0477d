"""DeepSpeed training engine: ZeRO 0 to 3 on CPU and CUDA, in the ranks of a train role or in one plain process."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from components.models.device import compute_device
from components.models.disk.weight_files import fill, filled
from components.models.layers import layers_of
from components.train.config import TrainConfig
from components.train.engine import TrainEngine
from components.train.memory_sizes import ZERO_NUMBERS
from components.train.optimizer import adam_of
from components.weights.gather import Part
from components.weights.parts import cut_part, unsharded_part


class DeepSpeedEngine(TrainEngine):
    """Training engine that shards the model with DeepSpeed."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        """
        Args:
            model: model with the same weights on all ranks, or an empty one made by `load_policy`. It is partitioned
                (`zero_stage` 3) and cast (bf16) in place.
            config: settings of this engine.
        """
        super().__init__(model, config)
        deepspeed = _import_deepspeed()
        self._deepspeed = deepspeed
        self._stage = config.stage
        settings = _deepspeed_json(model, config)
        if any(parameter.is_meta for parameter in model.parameters()):
            self._read_weights(model, settings)
        self.adam = adam_of(model, config)
        # Some of DeepSpeed's optimizers print their memory usage at any log level, which would end up in the run's log.
        with contextlib.redirect_stdout(io.StringIO()):
            self._engine: Any = deepspeed.initialize(model=model, optimizer=self.adam, config=settings)[0]
        self._start_average()

    def _read_weights(self, model: nn.Module, settings: dict[str, Any]) -> None:
        """Load the weights of an empty model, in the dtype that passes use.

        With `zero_stage` 3 this rank keeps its shard only, and never holds more than one full parameter.
        """
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self._type(parameter))
        if self._stage < 3:
            fill(model, self.device)
            return
        # DeepSpeed broadcasts the parameters of rank 0, so the other ranks need not read the files.
        one_by_one = _OneByOne(filled(model, self.device, reads=self.rank == 0))
        with contextlib.redirect_stdout(io.StringIO()):
            self._deepspeed.zero.Init(module=one_by_one, config_dict_or_path=settings)
        # DeepSpeed moves a model to the device only if the model is not partitioned. Buffers would stay on the host.
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.device)

    @property
    def _passes_are_collective(self) -> bool:
        return self._stage == 3

    @property
    def _trained(self) -> nn.Module:
        return self._engine

    def _begin_pass(self, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)

    def _backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def _step(self, learning_rate: float) -> float:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        if self._stage == 0:
            # ZeRO clips and measures the norm itself. Stage 0 offers no norm to read, so it is computed here.
            norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm or math.inf))
            self._check_gradient(norm)
            self._engine.step()
        else:
            # ZeRO skips a step whose norm is inf or nan, and reports that norm as inf.
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
            self._check_gradient(norm)
        return norm

    def _part(self, parameter: nn.Parameter, dtype: torch.dtype) -> Part:
        if self._stage < 3:
            return unsharded_part(parameter, dtype)
        partitioned: Any = parameter
        shard = partitioned.ds_tensor
        return cut_part(shard, partitioned.ds_shape, dtype, shard.ds_numel)

    @property
    def zero(self) -> Any:
        if self._stage == 0:
            return None
        return self._engine.optimizer

    def _tensors(self) -> Iterator[Tensor]:
        yield from super()._tensors()
        # An optimizer of DeepSpeed also holds flat tensors, in lists that differ by stage, precision and release.
        # Without them, an engine that is put to sleep would keep most of its memory.
        yield from tensors_within(vars(self._engine.optimizer))

    def _scratch(self) -> Iterator[Tensor]:
        """Yield the gradient buffers, whose contents no step reads before it writes them."""
        optimizer = self._engine.optimizer
        for bucket in getattr(optimizer, "ipg_buckets", {}).values():
            yield from tensors_within(bucket.buffer)
        for name in ("fp32_groups_gradients_flat", "grad_partitions_flat_buffer"):
            yield from tensors_within(getattr(optimizer, name, None))


class _OneByOne(nn.Module):
    """Module whose parameters are created one at a time while DeepSpeed partitions it."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__()
        self._one_by_one = parameters

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:  # noqa: ARG002 - as of a module
        return self._one_by_one


def _import_deepspeed() -> Any:
    """Import DeepSpeed, with its log level at ERROR and without its compiled extension for CPU collectives."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # On a CPU, every process group would first compile an extension for collectives in shared memory. That takes a
    # minute and needs ninja and g++. The attribute path `deepspeed.comm.torch` leads to the real torch, hence
    # sys.modules.
    backend: Any = sys.modules["deepspeed.comm.torch"]
    backend.build_shm_op = lambda: None
    return deepspeed


def _deepspeed_json(model: nn.Module, config: TrainConfig) -> dict[str, Any]:
    stage = config.stage
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": config.overlap_comm}
    numbers = ZERO_NUMBERS[compute_device().type]
    zero["reduce_bucket_size"] = zero["allgather_bucket_size"] = numbers
    if config.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if stage == 3:
        # Vectors are not partitioned: gathering one costs a collective call and frees next to no memory.
        vectors = [parameter.numel() for parameter in model.parameters() if parameter.ndim <= 1]
        zero["stage3_param_persistence_threshold"] = max(vectors, default=0)
        # Room for two layers: the one that computes and the one that is prefetched.
        largest = max((sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)), default=0)
        gathered = max(2 * largest, numbers)
        zero |= {"stage3_max_live_parameters": gathered, "stage3_max_reuse_distance": gathered}
        zero |= {"stage3_prefetch_bucket_size": gathered // 2, "sub_group_size": numbers}
    settings: dict[str, Any] = {
        # Micro-batches are cut by tokens, and the engine sets the accumulation boundary itself.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm if stage > 0 else 0.0,
        "zero_optimization": zero,
        # torch's fused AdamW is used. DeepSpeed's CPU Adam would be compiled at its first use.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if config.precision == "bf16":
        settings["bf16"] = {"enabled": True}
        # In bfloat16, a sum over many micro-batches would lose small gradients.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def tensors_within(value: object) -> Iterator[Tensor]:
    """Yield all tensors in nested lists, tuples, sets and dicts (keys and values)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from tensors_within(pair)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_within(item)
