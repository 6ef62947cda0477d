"""Training one model over the ranks, whichever library partitions it: what `TrainConfig.engine` names is opened here.

Legend: `B` sequences, `N` all tokens of a batch end to end, `G` groups of `S` sequences.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.batch import Batch
from components.models.device import compute_device, peak_gpu_memory
from components.models.disk.export import save_model
from components.models.packing.packed_model import packs
from components.models.precision import compute_in
from components.process.heartbeat import beat
from components.rl.aggregation import LossOutput, Totals
from components.rl.masked import sequence_sums
from components.train.collective_io import disk_errors
from components.train.config import TrainConfig
from components.train.host_memory import HostCopies
from components.train.mesh import Axes
from components.train.passes import evaluate_together
from components.train.state import EngineState, whole_shape
from components.train.utilisation import gpu_use
from components.train.weight_average import WeightAverage
from components.weights.gather import Part, gathered
from plugins.lora.adapters import Adapters
from plugins.parallel.router_loss import Routers, row_share
from plugins.prefix_sharing.shared_prompts import (
    runs_of,
    saved_by,
    shared_micro_batches,
    shares_of_runs,
    shares_prompts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUCKET_BYTES = {"cuda": 256 * 2**20, "cpu": 64 * 2**20}
"""Of partitioned parameters, what is gathered at a time, by the kind of device."""
LossFunction = Callable[[nn.Module, Batch, Totals], LossOutput]


def init_process_group(timeout_s: float = 1800.0) -> None:
    """Make the default process group that the environment describes; nothing happens when there is one.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT give the ranks and where they meet, LOCAL_RANK the device. With
    WORLD_SIZE absent or 1 nobody is met, and no address or port is needed. gloo on CPU, nccl on CUDA.

    A script of several ranks ends best with `os._exit`, once its output is flushed. DeepSpeed's parameters keep gloo's
    threads whatever is destroyed, and tearing the interpreter down beneath them aborts it, rarely. (Workloads of a job
    are ended from outside.)

    Args:
        timeout_s: seconds after which a collective that some rank did not join fails.
    """
    os.environ.setdefault("LOCAL_RANK", "0")
    if not torch.cuda.is_available():
        # DeepSpeed would warn of it, whoever imports it: where peft is, saving a model does.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        if "WORLD_SIZE" in os.environ and dist.get_world_size() != world_size:
            raise ValueError(
                f"this process is already in a group of {dist.get_world_size()}, but WORLD_SIZE={world_size}; another "
                "library made that group first: make the process group before it is imported"
            )
        return
    # NCCL complains of groups that nobody has left.
    atexit.register(_leave_process_group)
    if torch.cuda.is_available():
        # Ray shows each process only its own devices, counted from 0; DeepSpeed reads the variable too.
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if compute_device().type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if world_size == 1:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={world_size} without {', '.join(missing)} in the environment; "
            "set them (core does for train roles), or leave WORLD_SIZE out"
        )
    rank = int(os.environ["RANK"])
    store = _meeting_store(rank, world_size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _meeting_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store | None:  # pyright: ignore[reportPrivateImportUsage]
    """Where the ranks meet, at MASTER_ADDR alone: torch's own store listens at all addresses, to whoever comes. None,
    for torch's own, where that is a name, or torchrun has a store.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ or not address.replace(".", "").isdecimal():
        return None
    listening = socket.create_server((address, port)).detach() if rank == 0 else None
    store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    return store(address, port, world_size, rank == 0, timeout, master_listen_fd=listening)


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class TrainEngine(ABC):
    """One model under one optimizer. All ranks make the same calls in the same order."""

    average: WeightAverage | None = None
    """Of the master weights that are trained, when the config asks for it."""
    _asleep: HostCopies | None = None
    _adam: torch.optim.AdamW

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        """Join the other ranks, seed this one and make `model` ready. The engine of a library then takes it.

        Args:
            model: adapters are put into it, and automatic casting around its passes, where the config asks for it.
            config: of this engine.
        """
        init_process_group()
        self.config = config
        self.model = model
        """Partitioned parameters are empty, or parts, outside of passes."""
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.step_count = 0
        self.device = torch.device(compute_device().type)
        self.axes = Axes(config, self.device)
        # Ranks that share a layer drop the same.
        torch.manual_seed(config.seed + self.rank // config.tensor)
        self.adapters = Adapters(model, config) if config.lora_rank else None
        self.routers = Routers(model)
        compute_in(model, config.precision, self.device)

    @property
    @abstractmethod
    def _passes_are_collective(self) -> bool:
        """Whether a forward pass gathers parameters, so that every rank has to make it."""

    @property
    def _trained(self) -> nn.Module:
        """What a loss function calls."""
        return self.model

    @abstractmethod
    def _begin_pass(self, is_last: bool) -> None:
        """Prepare one forward and backward pass, the last of its optimizer step or not."""

    @abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Add to the gradient the average over the ranks of their losses' gradients."""

    @abstractmethod
    def _step(self, learning_rate: float) -> float:
        """Step the optimizer, unless `_check_gradient` objects; returns the gradient's 2-norm before clipping."""

    @abstractmethod
    def _part(self, parameter: nn.Parameter, dtype: torch.dtype) -> Part:
        """What this rank has of a parameter, to be gathered in this type. All ranks call this."""

    @property
    def _zero(self) -> Any:
        """DeepSpeed's optimizer around AdamW, where there is one."""
        return None

    def _state(self) -> EngineState:
        """Where the state of this engine lies."""
        adapters = self.adapters and self.adapters.note
        return EngineState(self.model, self._adam, self._zero, self.config, self.device, self.average, adapters)

    def _start_average(self) -> None:
        if self.config.ema_beta is not None:
            self.average = WeightAverage(self.config.ema_beta, self._state().master_weights())

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        return self.config.learning_rate_at(self.step_count)

    def forward(self, batch: Batch, compute: Callable[[nn.Module, Batch], Tensor], *, adapters: bool = True) -> Tensor:
        """Evaluate `batch` without gradients, in micro-batches.

        Args:
            batch: this rank's own; ranks may have different numbers of sequences.
            compute: (model, micro-batch of n tokens) -> [n].
            adapters: False: as the model was before its training, which is to have adapters.

        Returns:
            [N] on the CPU, in the order of `batch`.
        """
        self._check_awake()
        if not adapters:
            if self.adapters is None:
                raise ValueError("the model has no adapters, and its weights are trained; set lora_rank")
            with self.adapters.off():
                return self.forward(batch, compute)
        model, limits = self.model.eval(), self.config.forward_limits
        pooled, own = self.axes.pooled(batch)
        return evaluate_together(model, pooled, limits, self.device, compute, self._passes_are_collective)[own]

    def train_step(self, minibatch: Batch, loss_fn: LossFunction, group_size: int = 1) -> dict[str, float]:
        """One optimizer step on `minibatch`.

        Args:
            minibatch: the global one, the same on all ranks; each rank trains on its share.
            loss_fn: (model, micro-batch, totals) -> LossOutput, whose loss and metrics are sums over the
                micro-batch divided by totals, so that they add up to the mean over the minibatch.
            group_size: so many sequences that follow each other are compared by the loss, and never parted: 2 for
                pairs.

        Returns:
            "loss" and the metrics of `loss_fn`, summed over micro-batches and ranks; "grad_norm" before
            clipping; "learning_rate" of this step; on GPUs those of `_gpu_metrics`. The same on all ranks.

        Raises:
            ValueError: `minibatch` is empty, trains on no token or holds part of a group.
            FloatingPointError: the loss is not finite, or the gradient. On all ranks, and before the weights change.
                The engine cannot continue after it.
        """
        self._check_awake()
        began = time.perf_counter()
        totals = _totals(minibatch)
        packing, shares = packs(self.model), shares_prompts(self.model)
        plans = _plan(minibatch, self.axes.data, self.config, group_size, packing, shares)
        own = plans[self.axes.data_rank]
        # Everybody backpropagates equally often, because gradients are reduced together.
        forwards = max(len(plan) for plan in plans)
        self.model.train()
        sums: dict[str, Tensor] = {}
        for i in range(forwards):
            index = own[i] if i < len(own) else _shortest(minibatch, group_size)
            counts = 1.0 if i < len(own) else 0.0
            self._begin_pass(is_last=i == forwards - 1)
            micro = minibatch.select(index)
            output = self._loss(loss_fn, micro.to(self.device), totals, row_share(micro, minibatch))
            # Gradients are averaged over ranks, and the loss is already divided by the total of all ranks.
            self._backward(output.loss * (self.axes.shards.size() * counts))
            beat()
            for name, value in {"loss": output.loss, **output.metrics}.items():
                summand = value.detach().double() * counts
                sums[name] = sums[name] + summand if name in sums else summand
        metrics = self._reduced(sums)
        self._check_finite(metrics)
        learning_rate = self.learning_rate
        grad_norm = self._step(learning_rate)
        self.step_count += 1
        if self.average is not None:
            # Of the master weights, since small steps are lost in bfloat16.
            self.average.update(self._state().master_weights())
        return metrics | {"grad_norm": grad_norm, "learning_rate": learning_rate} | self._gpu_metrics(minibatch, began)

    def _loss(self, loss_fn: LossFunction, micro: Batch, totals: Totals, share: float) -> LossOutput:
        """Compute the loss of a micro-batch; of a mixture of experts also the load-balancing loss, weighted by the
        micro-batch's `share` of the rows that the step routes.
        """
        coefficient = self.config.router_aux_loss_coef
        if not coefficient or not self.routers:
            return loss_fn(self._trained, micro, totals)
        with self.routers.watched() as logits:
            output = loss_fn(self._trained, micro, totals)
        balance = self.routers.loss(logits, micro, packs(self.model)) * share
        metrics = output.metrics | {"router_aux_loss": balance.detach()}
        return LossOutput(output.loss + coefficient * balance, metrics)

    def _gpu_metrics(self, minibatch: Batch, began: float) -> dict[str, float]:
        """On GPUs the most that tensors have taken so far on any of them, and torch for them, in GB; and of the step
        that began then its tokens per second and GPU and its share of what the GPUs can do.
        """
        if self.device.type != "cuda":
            return {}
        memory = peak_gpu_memory()
        peak = torch.tensor([*memory.values(), time.perf_counter() - began], device=self.device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        *most, seconds = peak.tolist()
        return dict(zip(memory, most, strict=True)) | gpu_use(self.model, minibatch.lengths, seconds, self.world_size)

    def _check_gradient(self, norm: float) -> None:
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the loss of optimizer step {self.step_count} is finite, but its gradient is not: grad_norm={norm}; "
                "the weights were left as they are. Look for extreme values in the batch, or lower the learning rate"
            )

    def _reduced(self, sums: dict[str, Tensor]) -> dict[str, float]:
        names = sorted(sums)
        values = torch.stack([sums[name].to(self.device) for name in names])
        self.axes.summed(values)
        return dict(zip(names, values.tolist(), strict=True))

    def _check_finite(self, metrics: dict[str, float]) -> None:
        if math.isfinite(metrics["loss"]):
            return
        odd = ", ".join(f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value))
        raise FloatingPointError(
            f"the loss of optimizer step {self.step_count} is not finite: {odd}; the weights were left as they are. "
            "Look at the rewards, advantages and log-probabilities of the batch for inf and nan, or lower the learning "
            "rate"
        )

    def gathered_parameters(self, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The whole parameters, by name, on rank 0's CPU; tied ones once, under their first name. bf16: in bfloat16.

        Adapters are added to the weights beneath them: names and number are those of the model without adapters.

        Every rank must exhaust the iterator, since gathering is collective; ranks other than 0 get no items.
        A tensor may be the live parameter: it is valid until the next train_step.

        Args:
            everywhere: on every rank and its device; of a model without adapters.
        """
        trained = self._whole(self._state().parameters.items(), everywhere)
        if self.adapters is None:
            yield from trained
        else:
            yield from self.adapters.merged(self._frozen(), dict(trained))

    def gathered_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters alone, as `gathered_parameters` gives parameters, by the names of peft's files.

        Raises:
            ValueError: the model has none.
        """
        if self.adapters is None:
            raise ValueError("the model has no adapters; set lora_rank")
        yield from self.adapters.named(self._whole(self._state().parameters.items()))

    def _whole(
        self, parameters: Iterable[tuple[str, nn.Parameter]], everywhere: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        self._check_awake()
        parts = ((name, self._part(parameter, self._type(parameter))) for name, parameter in parameters)
        return gathered(parts, self.device, BUCKET_BYTES[self.device.type], everywhere)

    def _frozen(self) -> Iterator[tuple[str, Tensor]]:
        return self._whole((name, p) for name, p in self.model.named_parameters() if not p.requires_grad)

    def save_hf(self, path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Write a folder that `from_pretrained` loads. All ranks call this; rank 0 writes.

        It has the parameters as `gathered_parameters` gives them; with `ema_beta` the average of the weights, in the
        same type, instead of the weights. The adapters by themselves are in its folder `adapter`, as peft writes them,
        for the model that training started from.

        Args:
            path: folder, made when missing.
            tokenizer: saved into the same folder.

        Raises:
            OSError: rank 0 cannot write there. The ranks are through with gathering then.
        """
        self._check_awake()
        weights, adapters = self._exported()
        tensors = dict(self._shapes())
        try:
            if self.rank == 0:
                with disk_errors(f"write {path}"):
                    save_model(Path(path), self.model, tensors, weights)
                    if self.adapters is not None:
                        self.adapters.save(Path(path) / "adapter", adapters)
                    if tokenizer is not None:
                        tokenizer.save_pretrained(path)
        finally:
            # The other ranks gather to the end, whatever happens here.
            for _ in weights:
                pass

    def _exported(self) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Tensor]]:
        """The weights as `save_hf` writes them, and what is trained beside weights that are not."""
        parameters = self._state().parameters
        averaged: Iterable[tuple[str, Tensor]] = self.average.tensors.items() if self.average is not None else ()
        in_type = ((name, tensor.to(self._type(parameters[name]))) for name, tensor in averaged)
        trained = self._whole(parameters.items()) if self.average is None else in_type
        if self.adapters is None:
            return itertools.chain(trained, self._buffers()), {}
        adapters = dict(trained)
        return itertools.chain(self.adapters.merged(self._frozen(), adapters), self._buffers()), adapters

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Those that are saved with a model, on rank 0."""
        return iter(self._state().buffers.items() if self.rank == 0 else ())

    def _shapes(self) -> Iterator[tuple[str, Tensor]]:
        """Names, shapes and types of what `_exported` gives, on the meta device."""
        for name, parameter in self.model.named_parameters():
            if self.adapters is None or ".lora_" not in name:
                plain = name.replace(".base_layer.", ".")
                yield plain, torch.empty(whole_shape(parameter), dtype=self._type(parameter), device="meta")
        for name, buffer in self._state().buffers.items():
            yield name, buffer.to("meta")

    def save_state(self, folder: str | Path) -> None:
        """Write everything that training resumes from. All ranks call this, and each writes a share.

        The float32 master weights, AdamW's moments and step numbers, `step_count`, the model's persistent buffers,
        each rank's random state, and the average of the weights if there is one. Call it between two train_steps, and
        not after an error of one. With adapters only what is trained is written.

        Args:
            folder: on a file system that all ranks see; made when missing. What it has of an older state is replaced.

        Raises:
            OSError: some rank cannot write. On all ranks, each of which may continue.
        """
        self._check_awake()
        self._state().save(Path(folder), self.step_count)

    def load_state(self, folder: str | Path) -> list[str]:
        """Continue exactly where `save_state` was called. All ranks call this, and each reads what it needs.

        The engine is one just made from the same architecture; its own weights do not matter, but those beneath
        adapters have to be the same. Learning rate,
        schedule, AdamW's settings and `ema_beta` are those of its config. Load after the last engine of a process was
        made, because making one seeds the generator that dropout draws from.

        With the settings it was saved with, training continues to the last bit. With other ranks or another zero_stage
        the state is the same to the last bit, and later results differ by the order of sums; with other ranks dropout
        starts anew from the config's seed, and all ranks get the buffers of rank 0.

        Returns:
            What will not be exact, a sentence each; nothing when all is.

        Raises:
            ValueError: the folder is not whole, or the state of another model or of other adapters. On all ranks.
            OSError: some rank cannot read. On all ranks.
        """
        self._check_awake()
        self.step_count, inexact = self._state().load(Path(folder))
        return inexact

    def sleep(self) -> int:
        """Move all that this engine has on a GPU to host memory, until `wake`; nothing else can be asked meanwhile.

        Returns:
            Bytes of GPU memory that were given back. 0 on a CPU, where nothing is moved.
        """
        if self._asleep is None:
            self._asleep = HostCopies(self._tensors(), self._scratch())
        return self._asleep.nbytes

    def wake(self) -> None:
        """Bring back what `sleep` moved; nothing happens when the engine is awake."""
        if self._asleep is not None:
            self._asleep.restore()
        self._asleep = None

    def _check_awake(self) -> None:
        if self._asleep is not None:
            raise ValueError("the training engine is asleep, and what it holds is in host memory; call wake() first")

    def _scratch(self) -> Iterable[Tensor]:
        """What takes memory between two steps, though its content is of no use then."""
        return ()

    def _tensors(self) -> Iterator[Tensor]:
        """What has to be there in the next step."""
        state = self._state()
        for group in state.adam.param_groups:
            yield from group["params"]
        for moments in state.adam.state.values():
            yield from (value for value in moments.values() if isinstance(value, Tensor))
        yield from self.model.buffers()
        for parameter in self.model.parameters():
            # ds_tensor: this rank's part, where DeepSpeed has partitioned it.
            parts = parameter, parameter.grad, getattr(parameter, "ds_tensor", None)
            yield from (part for part in parts if part is not None)

    def _type(self, parameter: nn.Parameter) -> torch.dtype:
        """In which passes use it; a master weight may be of another."""
        return torch.bfloat16 if self.config.precision == "bf16" else parameter.dtype


def adam_of(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """The optimizer of what is trained in `model`."""
    return torch.optim.AdamW(
        _parameter_groups(model, config.weight_decay, config.weight_decay_all),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def _parameter_groups(model: nn.Module, weight_decay: float, is_for_all: bool) -> list[dict[str, Any]]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if weight_decay == 0 or is_for_all:
        return [{"params": parameters, "weight_decay": weight_decay}]
    # ds_shape: of the whole parameter, which DeepSpeed may have partitioned.
    matrices = [parameter for parameter in parameters if len(getattr(parameter, "ds_shape", parameter.shape)) > 1]
    vectors = [parameter for parameter in parameters if len(getattr(parameter, "ds_shape", parameter.shape)) <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _totals(minibatch: Batch) -> Totals:
    """Of what is trained on: `action_mask` where the batch has it, else `loss_mask`, else all tokens."""
    if not len(minibatch):
        raise ValueError("the minibatch is empty; give train_step at least one sequence")
    mask = next((name for name in ("action_mask", "loss_mask") if name in minibatch), None)
    # In float64, which counts exactly.
    tokens_B = sequence_sums(minibatch[mask].double(), minibatch.lengths) if mask else minibatch.lengths
    tokens = int(tokens_B.sum())
    if tokens == 0:
        raise ValueError(
            f"{mask} is False for all {minibatch.num_tokens} tokens of the minibatch, so nothing can be "
            "learned; leave such minibatches out"
        )
    return Totals(tokens=tokens, sequences=int((tokens_B > 0).sum()), rows=len(minibatch))


def _plan(
    minibatch: Batch,
    world_size: int,
    config: TrainConfig,
    group_size: int = 1,
    packing: bool = False,
    shares: bool = False,
) -> list[list[Tensor]]:
    """Which sequences each rank has in each of its micro-batches. Every rank computes this for all."""
    if len(minibatch) % group_size:
        raise ValueError(f"the minibatch has {len(minibatch)} sequences, which are no groups of {group_size}")
    runs = runs_of(minibatch) if shares and group_size == 1 else []
    if saved_by(runs):
        lengths_B = minibatch.lengths
        parts = shares_of_runs(lengths_B, runs, world_size)
        return [shared_micro_batches(lengths_B, part, config.max_tokens, config.max_sequences) for part in parts]
    length_GS = minibatch.lengths.view(-1, group_size)
    # What a group takes in a micro-batch: of padded rows the longest decides.
    cost_G = length_GS.sum(1) if packing else group_size * length_GS.amax(1)
    max_groups = max(1, config.max_sequences // group_size) if config.max_sequences else 0
    plans = []
    for share in Batch(length_GS.sum(1), {}).balanced_shares(world_size):
        cuts = Batch(cost_G[share], {}).micro_batch_indices(config.max_tokens, max_groups, packing)
        plans.append([_members(share[index], group_size) for index in cuts])
    return plans


def _members(group_G: Tensor, group_size: int) -> Tensor:
    """Positions of the sequences of some groups."""
    return (group_G.view(-1, 1) * group_size + torch.arange(group_size)).flatten()


def _shortest(batch: Batch, group_size: int = 1) -> Tensor:
    """Indices of the cheapest group, for a pass that is only made because other ranks make one."""
    return _members(batch.lengths.view(-1, group_size).sum(1).argmin(), group_size)
