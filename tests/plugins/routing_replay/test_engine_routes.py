"""Experts that vLLM's routers choose, replayed in training.

VLLM's CPU build does not report them by itself: its second model runner, which does, needs a GPU. Its routers can be
observed, so that the arrays of these tests hold what vLLM has chosen, in the layout of `CompletionOutput`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from components.batch import Batch
from components.generate.config import SamplingConfig
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.rl.aggregation import LossOutput, Totals
from components.train.config import TrainConfig
from components.train.opening import open_engine
from plugins.routing_replay.engine_routes import RouteReader
from plugins.routing_replay.replay import RoutingReplay
from plugins.routing_replay.routes import NO_EXPERT, from_columns
from plugins.vllm import options
from plugins.vllm.config import VLLMRolloutConfig
from plugins.vllm.engine import VLLMRolloutEngine
from tests.messages import says
from tests.plugins.vllm.families import write_family

PROMPTS = [[3, 14, 15, 9, 26, 5], [35, 8], [7, 9, 32, 38, 46]]
HIDDEN = 2
"""Hidden layers of the tiny models."""


def observe(worker: Any, chosen: list[list[torch.Tensor]]) -> None:
    """Record the experts that each router chooses, by hidden layer."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    for module in worker.model_runner.model.modules():
        if isinstance(module, MoERunner):
            layer: Any = module
            layer.router.set_capture_fn(chosen[layer.layer_id].append)


def finished_requests(folder: Path, top_k: int) -> list[Any]:
    """Return vLLM's outputs with the experts of their tokens, one request at a time."""
    chosen: list[list[torch.Tensor]] = [[] for _ in range(HIDDEN)]
    # Tokens of a cached prefix would skip the routers.
    engine = VLLMRolloutEngine(folder, VLLMRolloutConfig(cpu_cache_gb=0.1, enable_prefix_caching=False))
    requests: list[Any] = []
    try:
        engine._llm.collective_rpc(partial(observe, chosen=chosen))
        for number, tokens in enumerate(PROMPTS):
            prompts = Batch.from_rows({"tokens": [tokens]}, {"prompt_id": [number], "sample_id": [0]})
            rows, parameters = options.requests(prompts, SamplingConfig(max_new_tokens=8))
            (request,) = engine._llm.generate(rows, parameters, use_tqdm=False)
            read = len(tokens) + len(request.outputs[0].token_ids) - 1
            array_PHK = np.zeros((read, HIDDEN, top_k), dtype=np.uint8)
            for layer, parts in enumerate(chosen):
                if parts:
                    array_PHK[:, layer] = torch.cat(parts)[:read].numpy()
                parts.clear()
            request.outputs[0].routed_experts = array_PHK
            requests.append(request)
    finally:
        engine.close()
    return requests


@pytest.mark.full
@pytest.mark.vllm
@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.nightly), "glm4_moe"])
def test_the_trainer_routes_each_token_as_vllm_did(family: str, tmp_path: Path) -> None:
    folder = write_family(family, tmp_path / "model")
    # Loaded first, because vLLM changes classes of transformers in its process.
    engine = open_engine(load_policy(folder), TrainConfig(engine="fsdp", zero_stage=2, learning_rate=0.0))
    reader = RouteReader(folder)
    # The first layer of glm4_moe is dense, and has no router.
    assert reader.layers == ([1] if family == "glm4_moe" else [0, 1])
    requests = finished_requests(folder, reader.top_k)
    rows = [[*request.prompt_token_ids, *request.outputs[0].token_ids] for request in requests]
    masks = [torch.arange(len(row)) > 0 for row in rows]
    batch = Batch.from_rows({"tokens": rows, "action_mask": masks}).with_tokens(**reader.columns(requests))

    recorded = RoutingReplay(engine, "policy").logprobs(batch.only("tokens"), 1.0)
    shape = len(reader.layers), reader.top_k, reader.experts
    own_NLK, reported_NLK = (from_columns(columns.per_token, *shape) for columns in (recorded, batch))
    # In float32 with equal weights vLLM's routers choose the same experts, possibly in another order.
    torch.testing.assert_close(reported_NLK.sort(-1).values, own_NLK.sort(-1).values, rtol=0, atol=0)

    def loss(model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        return LossOutput(-(token_logprobs(model, micro).logprob_N * micro["action_mask"]).sum() / totals.tokens, {})

    replay = RoutingReplay(engine, "engine")
    assert engine.train_step(batch, replay.replaying(loss))["routes_differ_share"] == 0


def request_of(prompt: int, response: int, routed_experts: np.ndarray | None) -> Any:
    """Return vLLM's output of a request with this number of tokens."""
    from vllm.outputs import CompletionOutput, RequestOutput

    completion = CompletionOutput(0, "", [0] * response, None, None, routed_experts=routed_experts)
    return RequestOutput("0", None, [0] * prompt, None, [completion], finished=True)


@pytest.mark.full
@pytest.mark.vllm
def test_tokens_without_routes_are_left_to_the_router_and_other_shapes_are_refused(tmp_path: Path) -> None:
    reader = RouteReader(write_family("glm4_moe", tmp_path / "model"))
    routes_PHK = np.array([[[9, 9], [0, 3]], [[9, 9], [2, 1]]], dtype=np.uint8)
    columns = reader.columns([request_of(2, 1, routes_PHK), request_of(1, 1, None)])
    route_NLK = from_columns(columns, 1, reader.top_k, reader.experts)
    none = [NO_EXPERT, NO_EXPERT]
    assert route_NLK[:, 0].tolist() == [[0, 3], [2, 1], none, none, none]
    with pytest.raises(ValueError, match=says("2 tokens", "a request of 5 tokens", "rollout.routing_replay=off")):
        reader.columns([request_of(2, 3, routes_PHK)])
