"""Experts of each token that a vLLM engine reports, as columns of the rollouts.

vLLM 0.32 reports them per finished request (`enable_return_routed_experts`), with its second model runner, which needs
a GPU. The array of a request has a row for each token that the engine has read: prompt and response but the last token,
which no token follows. It has an entry for each hidden layer, also for dense ones.

Legend: `N` tokens of a batch end to end, `P` tokens that a request has read, `H` hidden layers, `L` routed layers, `K`
experts per token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from components.models.disk.meta_model import meta_model
from components.models.routers import find_routers
from plugins.routing_replay.routes import NO_EXPERT, expert_counts, to_columns

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class RouteReader:
    """Converts the routes of an engine's requests to columns of a batch. One per engine."""

    def __init__(self, model_path: str | Path) -> None:
        """
        Args:
            model_path: folder or hub name of the model.

        Raises:
            ValueError: the model has no routers.
        """
        model = meta_model(model_path)
        routers = set(map(id, find_routers(model).modules))
        matches = [_LAYER.search(name) for name, module in model.named_modules() if id(module) in routers]
        self.layers = [int(match[1]) for match in matches if match]
        """Indices of the routed layers among the hidden layers, in the order of the model."""
        self.experts, self.top_k = expert_counts(model.config)
        if not self.layers or not self.experts or not self.top_k:
            raise ValueError(
                f"rollout.routing_replay=engine: {model_path} has no routers that are known here; set it to off"
            )

    def columns(self, requests: Sequence[Any]) -> dict[str, Tensor]:
        """Return the columns of routes of prompts and responses, [N] each. See `to_columns`.

        Tokens without routes, such as those of an aborted request, are left to the router in training.

        Args:
            requests: vLLM's `RequestOutput` of each prompt.

        Raises:
            ValueError: a request has routes of another number of tokens, layers or experts.
        """
        parts = [self._of_request(request) for request in requests]
        empty = torch.zeros(0, len(self.layers), self.top_k, dtype=torch.int64)
        return to_columns(torch.cat([empty, *parts]), self.experts)

    def _of_request(self, request: Any) -> Tensor:
        response = request.outputs[0]
        length = len(request.prompt_token_ids) + len(response.token_ids)
        route_NLK = torch.full((length, len(self.layers), self.top_k), NO_EXPERT)
        reported_PHK: np.ndarray | None = response.routed_experts
        if reported_PHK is None:
            return route_NLK
        tokens, layers, top_k = reported_PHK.shape
        if tokens not in (length - 1, length) or layers <= max(self.layers) or top_k != self.top_k:
            raise ValueError(
                f"vLLM reports the experts of {tokens} tokens, {layers} layers and {top_k} experts per token for a "
                f"request of {length} tokens; the model has routers up to layer {max(self.layers)} and {self.top_k} "
                "experts per token. Set rollout.routing_replay=off"
            )
        # The last token predicts nothing. Some requests that were stopped have an entry for it.
        known = torch.from_numpy(reported_PHK[: length - 1, self.layers].astype(np.int64))
        route_NLK[: len(known)] = known
        return route_NLK
