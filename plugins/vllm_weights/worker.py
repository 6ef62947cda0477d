"""Weight receiver in vLLM's worker processes. vLLM adds this class as a mixin to its worker class."""

from __future__ import annotations

import functools
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from components.generate.engine_start import ENGINE_PID
from components.models.device import peak_gpu_memory
from components.models.layer_marks import marked
from components.weights.digest import Digests
from components.weights.publisher import WeightHandle, read_weights
from plugins.vllm_weights.layouts import arranged
from plugins.vllm_weights.reload import SinkCopies, complete_reload, experts_packed, load_in_place, loads_in_place

TESTED = "0.32.0"
"""Version of vLLM that this module was tested with. It is that of constraints.txt."""


class WeightReceiver:
    """Extends vLLM's worker; every public method can be called through `collective_rpc`."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    rank: int
    """Rank among the processes of this engine."""
    reload_weights: Any
    _marking: Any
    _marks: dict[str, list[Tensor]]

    def free_bytes(self) -> int:
        """Return the number of free bytes of this worker's GPU."""
        return torch.cuda.mem_get_info()[0]

    def gpu_memory(self) -> dict[str, float]:
        """See `peak_gpu_memory`."""
        return peak_gpu_memory()

    def receive_weights(self, pickled: bytes, with_digests: bool) -> dict[str, str]:
        """Load a version in place.

        Args:
            pickled: handle of the version.
            with_digests: return digests.

        Returns:
            Digests of the tensors that have arrived, by published name.

        Raises:
            RuntimeError: vLLM did not load all weights of the version.
        """
        end_with_engine()
        handle: WeightHandle = pickle.loads(pickled)
        digests = Digests()
        errors: list[Exception] = []
        model = model_of(self)
        sinks = SinkCopies(model)

        def arriving() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in read_weights(handle, part=self.rank):
                if with_digests:
                    digests.add(name, tensor)
                yield name, tensor

        def loadable() -> Iterator[tuple[str, Tensor]]:
            family = self.model_config.hf_text_config.model_type
            try:
                yield from arranged(sinks.noted(arriving()), family, self.model_config.model)
            except Exception as error:  # noqa: BLE001 - the error of any carrier is raised below
                # An interrupted reload would leave vLLM unable to load a later version, so the reload is completed and
                # the error is raised afterwards.
                errors.append(error)

        if loads_in_place(model, self.model_config.quantization is not None):
            self._load_in_place(loadable())
            if errors:
                raise errors[0]
            return digests.result()
        with experts_packed(model), complete_reload(model, sinks.modules.values()):
            self.reload_weights(weights_iterator=loadable(), is_checkpoint_format=True)
            if errors:
                raise errors[0]
        sinks.copy(self.rank)
        self._repack_head()
        return digests.result()

    def _load_in_place(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            load_in_place(model_of(self), weights)
        # The layerwise reload of vLLM's model runner also drops what was computed from images with the old weights.
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()

    def mark_layers(self) -> None:
        """Begin to record marks of the layers' outputs; see `components/models/layer_marks.py`."""
        self._marking = marked(model_of(self))
        self._marks = self._marking.__enter__()

    def layer_marks(self) -> dict[str, Tensor]:
        """Stop recording marks, and return them by group of layers."""
        self._marking.__exit__(None, None, None)
        return {group: torch.cat(parts) for group, parts in self._marks.items()}

    def _repack_head(self) -> None:
        """Pack a tied head again. On a CPU it is a packed copy of the embeddings, which a reload does not update."""
        model = model_of(self)
        head = getattr(model, "lm_head", None)
        method = getattr(head, "quant_method", None)
        if method is not None and not next(model.parameters()).is_cuda:
            method.process_weights_after_loading(head)


def model_of(worker: Any) -> nn.Module:
    """Return the model of one of vLLM's workers.

    Raises:
        RuntimeError: this version of vLLM does not provide it. The message names the versions that do.
    """
    # The function that vLLM's public `LLM.apply_model` uses. Older versions have it in the model runner only.
    for owner in (worker, getattr(worker, "model_runner", None)):
        get_model = getattr(owner, "get_model", None)
        if get_model is not None:
            return get_model()
    model = getattr(getattr(worker, "model_runner", None), "model", None)
    if model is None:
        installed = getattr(sys.modules.get("vllm"), "__version__", "of unknown version")
        raise RuntimeError(
            f"vLLM {installed}: {type(worker).__name__} has neither get_model nor model_runner.model, so no weights "
            f"can be loaded; install vLLM {TESTED}, or set rollout.engine=hf"
        )
    return model


@functools.cache
def end_with_engine() -> None:
    """End this process as soon as the process that started the engine ends, even if this one waits in a collective.

    Does nothing if vLLM runs in that process.
    """
    pid = int(os.environ.get(ENGINE_PID, os.getpid()))
    if pid != os.getpid():
        threading.Thread(target=_end_after, args=(os.pidfd_open(pid),), daemon=True).start()


def _end_after(process: int) -> None:
    """Kill this process once another one, given by a descriptor, has ended."""
    select.select([process], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
