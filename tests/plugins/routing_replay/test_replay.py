"""With replayed routes, a pass gives the log-probabilities and gradients of the recorded pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from components.batch import Batch
from components.models.causal import policy_logprobs, token_logprobs
from components.models.loading import load_policy
from components.models.routers import find_routers, route_columns
from components.rl.aggregation import LossOutput, Totals
from components.train.config import TrainConfig
from components.train.engine import TrainEngine
from components.train.opening import open_engine
from plugins.routing_replay.replay import RoutingReplay
from plugins.routing_replay.routes import NO_EXPERT, from_columns, to_columns
from tests.messages import says
from tests.plugins.vllm.families import MIXTURES, write_family

ROWS = [[3, 14, 15, 9, 26, 5], [35, 8], [9], [7, 9, 32, 38, 46, 26, 43, 3, 8, 3]]
FAMILIES = [name for name in MIXTURES if name != "qwen3_moe_padded"]
TRAIN: dict[str, Any] = {"engine": "fsdp", "zero_stage": 2, "learning_rate": 0.0, "max_grad_norm": 0.0}
Opener = Callable[..., tuple[TrainEngine, RoutingReplay]]


def batch_of(rows: list[list[int]] = ROWS) -> Batch:
    masks = [torch.arange(len(row)) > 0 for row in rows]
    return Batch.from_rows({"tokens": rows, "action_mask": masks})


@pytest.fixture
def opened(tmp_path: Path) -> Opener:
    """Open a training engine with a tiny mixture, and its replay."""

    def open_family(family: str, source: str = "policy", **options: Any) -> tuple[TrainEngine, RoutingReplay]:
        folder = tmp_path / family
        if not folder.exists():
            write_family(family, folder)
        loading = {name: options.pop(name) for name in ("packing", "gradient_checkpointing") if name in options}
        engine = open_engine(load_policy(folder, **loading), TrainConfig(**TRAIN, **options))
        return engine, RoutingReplay(engine, source)

    return open_family


def with_random_routes(batch: Batch, replay: RoutingReplay) -> Batch:
    """Send every token to experts drawn at random."""
    scores_NLE = torch.rand(batch.num_tokens, replay.layers, replay.experts, generator=torch.Generator().manual_seed(0))
    return batch.with_tokens(**to_columns(scores_NLE.topk(replay.top_k, dim=-1).indices, replay.experts))


def train(engine: TrainEngine, replay: RoutingReplay | None, batch: Batch) -> tuple[dict[str, float], Tensor]:
    """Take a step that changes no weight. Return its metrics and the log-probabilities of its pass."""
    parts: dict[int, Tensor] = {}

    def loss(model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        output = token_logprobs(model, micro)
        rows = output.logprob_N.detach().split(micro.lengths.tolist())
        parts.update(zip(micro["row"].tolist(), rows, strict=True))
        return LossOutput(-(output.logprob_N * micro["action_mask"]).sum() / totals.tokens, {})

    numbered = batch.with_sequences(row=torch.arange(len(batch)))
    metrics = engine.train_step(numbered, replay.replaying(loss) if replay else loss)
    return metrics, torch.cat([parts[row] for row in range(len(batch))])


@pytest.mark.parametrize("experts", [4, 255, 256, 512])
def test_routes_survive_the_conversion_to_columns(experts: int) -> None:
    route_NLK = torch.randint(NO_EXPERT, experts, (5, 3, 3), generator=torch.Generator().manual_seed(0))
    route_NLK[0] = experts - 1
    route_NLK[1] = NO_EXPERT
    columns = to_columns(route_NLK, experts)
    assert [(column.dtype, column.shape) for column in columns.values()] == [(torch.int64, (5,))] * len(columns)
    # Nine experts of one or two bytes each, in columns of eight bytes.
    assert len(columns) == (2 if experts < 256 else 3)
    torch.testing.assert_close(from_columns(columns, 3, 3, experts), route_NLK)


def test_routes_of_another_model_are_refused_with_both_numbers() -> None:
    columns = to_columns(torch.zeros(5, 3, 3, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match=says("2 columns", "20 layers with 8 of 128 experts", 20)):
        from_columns(columns, 20, 8, 128)


@pytest.mark.parametrize("packing", [None, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_routes_of_the_same_weights_change_no_bit(opened: Opener, family: str, packing: bool | None) -> None:
    engine, replay = opened(family, packing=packing)
    batch = batch_of()
    recorded = replay.logprobs(batch.only("tokens"), 1.0)
    torch.testing.assert_close(recorded["logprob"], engine.forward(batch, policy_logprobs), rtol=0, atol=0)
    route_NLK = from_columns(recorded.per_token, replay.layers, replay.top_k, replay.experts)
    is_last_N = torch.zeros(batch.num_tokens, dtype=torch.bool)
    is_last_N[batch.offsets[1:] - 1] = True
    assert (route_NLK[is_last_N] == NO_EXPERT).all(), "nothing is predicted from a last token"
    assert (route_NLK[~is_last_N] >= 0).all()
    plain, logprob_N = train(engine, None, batch)
    metrics, replayed_N = train(engine, replay, batch.with_tokens(**recorded.without("logprob").per_token))
    torch.testing.assert_close(replayed_N, logprob_N, rtol=0, atol=0)
    assert metrics.pop("routes_differ_share") == 0
    assert metrics == plain


@pytest.mark.parametrize("family", FAMILIES)
def test_each_token_uses_its_routed_experts_with_packing_padding_and_alone(opened: Opener, family: str) -> None:
    logprobs: dict[str, Tensor] = {}
    norms: dict[str, float] = {}
    for name, packing in (("packed", None), ("padded", False)):
        engine, replay = opened(family, packing=packing)
        batch = with_random_routes(batch_of(), replay)
        metrics, logprobs[name] = train(engine, replay, batch)
        norms[name] = metrics["grad_norm"]
        if replay.top_k < replay.experts:
            assert metrics["routes_differ_share"] > 0.5, "routes that were drawn at random are not the router's own"
        if packing is False:
            live_N = engine.forward(batch, policy_logprobs)
            assert (live_N - logprobs[name]).abs().max() > 1e-3, "the routes have an effect"
            alone = [train(engine, replay, batch.select([i]))[1] for i in range(len(batch)) if batch.lengths[i] > 1]
            expected_N = torch.cat([logprobs[name][: len(ROWS[0]) + len(ROWS[1])], logprobs[name][-len(ROWS[3]) :]])
            torch.testing.assert_close(torch.cat(alone), expected_N, rtol=0, atol=5e-6)
    torch.testing.assert_close(logprobs["packed"], logprobs["padded"], rtol=0, atol=5e-6)
    assert norms["packed"] == pytest.approx(norms["padded"], rel=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_activation_checkpointing_computes_the_same_gradients_under_replay(opened: Opener, family: str) -> None:
    norms: list[float] = []
    for checkpointing in (False, True):
        engine, replay = opened(family, gradient_checkpointing=checkpointing)
        metrics, _ = train(engine, replay, with_random_routes(batch_of(), replay))
        norms.append(metrics["grad_norm"])
    assert norms[0] == norms[1]


def test_the_router_gets_gradients_under_replay(opened: Opener) -> None:
    engine, replay = opened("qwen3_moe")
    router = find_routers(engine.model).modules[0]
    output = replay.replaying(
        lambda model, micro, totals: LossOutput(-token_logprobs(model, micro).logprob_N.sum() / totals.tokens, {})
    )(engine.model.train(), with_random_routes(batch_of(), replay), Totals(15, 3, 4))
    (gradient,) = torch.autograd.grad(output.loss, [next(router.parameters())])
    assert gradient.norm() > 1e-3


def test_tokens_without_a_route_use_the_router(opened: Opener) -> None:
    engine, replay = opened("qwen3_moe")
    batch = batch_of()
    _, own_N = train(engine, None, batch)
    unknown_NLK = torch.full((batch.num_tokens, replay.layers, replay.top_k), NO_EXPERT)
    metrics, logprob_N = train(engine, replay, batch.with_tokens(**to_columns(unknown_NLK, replay.experts)))
    torch.testing.assert_close(logprob_N, own_N, rtol=0, atol=0)
    assert metrics["routes_differ_share"] == 0


def test_log_probabilities_follow_the_routes_of_an_engine(opened: Opener) -> None:
    engine, replay = opened("gpt_oss", source="engine")
    batch = with_random_routes(batch_of(), replay)
    columns = replay.logprobs(batch.only("tokens", *route_columns(batch.per_token)), 1.0)
    assert list(columns.per_token) == ["logprob"]
    torch.testing.assert_close(columns["logprob"], train(engine, replay, batch)[1], rtol=0, atol=5e-6)


def test_a_trainer_that_replays_the_routes_of_a_bfloat16_engine_is_closer_to_it(opened: Opener) -> None:
    # The engine has the same weights but rounds differently, so tokens near a tie are routed to other experts.
    rows = torch.randint(3, 64, (16, 24), generator=torch.Generator().manual_seed(0)).tolist()
    batch = batch_of(rows)
    low, recorder = opened("gpt_oss", precision="bf16_autocast")
    sampled = recorder.logprobs(batch.only("tokens"), 1.0)
    engine, replay = opened("gpt_oss", source="engine")
    own_gap_N = (engine.forward(batch, policy_logprobs) - sampled["logprob"]).abs()
    replayed = replay.logprobs(sampled.without("logprob").with_tokens(tokens=batch["tokens"]), 1.0)
    gap_N = (replayed["logprob"] - sampled["logprob"]).abs()
    assert low.config.precision == "bf16_autocast"
    assert gap_N.max() < own_gap_N.max() / 2


def test_a_dense_model_is_refused_with_its_type(tmp_path: Path) -> None:
    engine = open_engine(load_policy(write_family("llama", tmp_path / "model")), TrainConfig(**TRAIN))
    with pytest.raises(ValueError, match=says("rollout.routing_replay=policy", "llama", "off")):
        RoutingReplay(engine, "policy")
