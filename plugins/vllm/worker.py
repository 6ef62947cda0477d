"""What vLLM's worker processes do for us: vLLM mixes this class into its own worker, wherever that runs."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from components.models.device import peak_gpu_memory
from components.weights.digest import digest
from components.weights.publisher import WeightHandle, read_weights


class WeightReceiver:
    """Extends vLLM's worker; every public method can be called through `collective_rpc`."""

    model_runner: Any
    rank: int
    """Among the processes of this engine."""
    reload_weights: Any

    def free_bytes(self) -> int:
        """Of this worker's GPU."""
        return torch.cuda.mem_get_info()[0]

    def gpu_memory(self) -> dict[str, float]:
        """See `peak_gpu_memory`."""
        return peak_gpu_memory()

    def receive_weights(self, pickled: bytes, with_digests: bool) -> dict[str, str]:
        """Load the version of a pickled handle in place; with digests: those of what has arrived, by published name."""
        handle: WeightHandle = pickle.loads(pickled)
        digests: dict[str, str] = {}
        broken: list[Exception] = []

        def arriving() -> Iterator[tuple[str, Tensor]]:
            try:
                for name, tensor in read_weights(handle, part=self.rank):
                    if with_digests:
                        digests[name] = digest(tensor)
                    yield name, tensor
            except Exception as error:  # noqa: BLE001 (of whichever way the weights come)
                # From between two loads vLLM finds no way to a later version: it has to come to its end.
                broken.append(error)

        self.reload_weights(weights_iterator=arriving(), is_checkpoint_format=True)
        self._repack_head()
        if broken:
            raise broken[0]
        return digests

    def _repack_head(self) -> None:
        """On a CPU a tied head keeps a packed copy of the embeddings, which vLLM does not renew, and says nothing."""
        head = getattr(self.model_runner.model, "lm_head", None)
        method = getattr(head, "quant_method", None)
        if method is not None and not next(self.model_runner.model.parameters()).is_cuda:
            method.process_weights_after_loading(head)
