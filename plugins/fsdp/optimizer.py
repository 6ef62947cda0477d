"""AdamW on this rank's shards.

The parameters of FSDP are DTensors. Their dispatch costs the host more time per parameter than a GPU needs for the
update, so the step below passes the local tensors of a whole group to torch's fused kernel in one call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LocalAdamW(torch.optim.AdamW):
    """Fused AdamW with one call per parameter group. Groups and state are those of `torch.optim.AdamW`."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002 - as in torch
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not trained:
                continue
            states = [self._state_of(parameter) for parameter in trained]
            moments, squares = ([local(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq"))
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                [local(parameter) for parameter in trained],
                [local(parameter.grad) for parameter in trained],
                moments,
                squares,
                [],
                steps,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of a parameter, which is created at its first step or loaded from a checkpoint."""
        state = self.state[parameter]
        if not state:
            shard = local(parameter)
            state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
            state["exp_avg"] = torch.zeros_like(shard, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(shard, memory_format=torch.preserve_format)
        return state


def local(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor without a call of the dispatcher. Other tensors are returned unchanged."""
    return getattr(tensor, "_local_tensor", tensor)
