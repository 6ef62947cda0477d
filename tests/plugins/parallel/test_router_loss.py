"""The load-balancing loss of a mixture of experts is transformers' own, with padding and without."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from components.batch import Batch
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.models.routers import find_routers
from components.models.state_values import state_values
from components.models.value_model import load_value_model
from components.rl.aggregation import LossOutput, Totals
from components.train.config import TrainConfig
from components.train.opening import open_engine
from plugins.alarms.alarms import Alarms
from plugins.parallel.router_loss import RouterLoss, load_balancing_loss, routed_sums, router_metrics, row_share

SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
LINEAR = ("router_aux_loss", "router_logsumexp", "expert_load_", "grad_norm")
"""Metrics that do not depend on the split of a step into micro-batches."""
ROWS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12]]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two layers of four experts, two of them per token."""
    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, dtype="float32")
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def expected(folder: Path, rows: list[list[int]]) -> float:
    """Return the router loss of transformers for these rows, padded with a mask."""
    model = MixtralForCausalLM.from_pretrained(folder, output_router_logits=True)
    width = max(map(len, rows))
    tokens_BT = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask_BT = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        return float(model(input_ids=tokens_BT, attention_mask=mask_BT).aux_loss)


def whole(layers: Sequence[torch.Tensor], counted_R: torch.Tensor, top_k: int) -> float:
    """Return the loss of a step of one micro-batch."""
    sums = routed_sums(layers, counted_R, top_k)
    return float(load_balancing_loss(sums, sums))


def test_the_router_loss_equals_a_calculation_by_hand() -> None:
    # Two tokens and three experts, one per token: the first and the second. Probabilities .5 .25 .25 and .25 .5 .25.
    logits_RE = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()
    # Shares of assignments .5 .5 0, mean probabilities .375 .375 .25: 3 * (.1875 + .1875).
    assert whole([logits_RE], torch.ones(2), 1) == pytest.approx(1.125)
    # The second token is padding: 3 * 1 * .5.
    assert whole([logits_RE], torch.tensor([1.0, 0.0]), 1) == pytest.approx(1.5)


def test_router_losses_of_micro_batches_sum_to_that_of_the_step() -> None:
    # The same two tokens as two micro-batches. Each one alone would have a loss of 1.5.
    logits_RE = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()
    micros = [routed_sums([row_1E], torch.ones(1), 1) for row_1E in logits_RE.split(1)]
    step = routed_sums([logits_RE], torch.ones(2), 1)
    # Assignment shares of the step .5 .5 0, and half of each token's probabilities: 3 * (.5 * .25 + .5 * .125).
    assert [float(load_balancing_loss(each, step)) for each in micros] == pytest.approx([0.5625, 0.5625])


def test_the_router_loss_equals_that_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    layers: Any = tuple(torch.randn(12, 5, generator=generator) for _ in range(3))
    mask_BT = torch.rand(3, 4, generator=generator) < 0.7
    theirs = load_balancing_loss_func(layers, 5, 2, mask_BT)
    assert whole(layers, mask_BT.flatten().float(), 2) == pytest.approx(float(theirs), rel=1e-6)


def policy_loss(model: torch.nn.Module, micro: Batch, totals: Totals) -> LossOutput:
    return LossOutput(-token_logprobs(model, micro).logprob_N.sum() / totals.tokens)


def balance_of(model: torch.nn.Module, batch: Batch, compute: Callable[..., object]) -> torch.Tensor:
    """Return the router loss of a forward pass that is a whole step."""

    def nothing(model: torch.nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        compute(model, micro)
        return LossOutput(torch.zeros(()))

    totals, plans = Totals(1, 1, 1), [[torch.arange(len(batch))]]
    # The engine is not used if the step has one micro-batch.
    engine: Any = None
    return RouterLoss(model).added_to(nothing, batch, plans, engine)(model, batch, totals).loss


@pytest.mark.parametrize("packed", [False, True])
def test_padding_does_not_count_in_the_router_loss(experts: Path, packed: bool) -> None:
    model = load_policy(experts, packing=packed)
    batch = Batch.from_rows({"tokens": ROWS})
    # The last token of a sequence predicts nothing and is not counted in either layout.
    read = [row[:-1] for row in ROWS]
    assert float(balance_of(model, batch, token_logprobs).detach()) == pytest.approx(expected(experts, read), rel=1e-5)


def test_a_gradient_step_balances_the_routers_of_a_value_model(experts: Path) -> None:
    model = load_value_model(experts, gradient_checkpointing=True).train()
    batch = Batch.from_rows({"tokens": ROWS})
    loss = balance_of(model, batch, state_values)
    assert float(loss.detach()) == pytest.approx(expected(experts, ROWS), rel=1e-5)
    loss.backward()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "gate.weight" in name:
                assert weight.grad is not None
                weight.sub_(0.1 * weight.grad)
    # After a small step the same tokens are assigned to the same experts, with lower probabilities.
    assert balance_of(model, batch, state_values) < loss


def test_micro_batches_are_weighted_by_their_routed_rows() -> None:
    # 4, 1 and 2 tokens have a successor.
    minibatch = Batch.from_rows({"tokens": ROWS})
    assert row_share(minibatch, minibatch) == 1
    assert row_share(minibatch.select(torch.tensor([0])), minibatch) == pytest.approx(4 / 7)
    assert row_share(minibatch.select(torch.tensor([1, 2])), minibatch) == pytest.approx(3 / 7)
    alone = Batch.from_rows({"tokens": [[3], [4]]})
    assert row_share(alone, alone) == 0
    assert whole([torch.zeros(2, 3)], torch.zeros(2), 1) == 0


def test_router_metrics_equal_a_calculation_by_hand() -> None:
    # Four tokens and four experts, one per token: expert 0 three times, expert 1 once. The last token is padding.
    logits_RE = torch.tensor([[2.0, 0, 0, 0], [2.0, 0, 0, 0], [2.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 2.0, 0]])
    metrics = router_metrics(routed_sums([logits_RE], torch.tensor([1.0, 1, 1, 1, 0]), 1), 1)
    # Shares .75 .25 0 0, relative to .25. With the range 1 to 4, the load of the busiest is (3 - 1) / (4 - 1).
    assert {name: float(x) for name, x in metrics.items()} == pytest.approx(
        {
            "router_load_max": 3.0,
            "router_load_min": 0.0,
            "router_imbalance": 2 / 3,
            "router_imbalance_max": 2 / 3,
            "router_logsumexp": math.log(math.exp(2) + 3),
            "expert_load_0": 3.0,
            "expert_load_1": 1.0,
            "expert_load_2": 0.0,
            "expert_load_3": 0.0,
        }
    )
    # In the first of two layers all tokens use the same two experts: collapsed.
    layers = [torch.tensor([[3.0, 2, 0, 0]] * 4), torch.tensor([[3.0, 2, 0, 0], [0, 0, 3.0, 2]] * 2)]
    metrics = router_metrics(routed_sums(layers, torch.ones(4), 2), 2)
    assert (float(metrics["router_imbalance"]), float(metrics["router_imbalance_max"])) == (0.5, 1.0)
    # Each token uses all experts.
    sums = routed_sums([torch.rand(5, 2)], torch.ones(5), 2)
    assert float(router_metrics(sums, 2)["router_imbalance"]) == pytest.approx(0)


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_loss_and_loads_are_equal_packed_padded_split_and_with_sequences_that_are_not_trained_on(
    experts: Path, coefficient: float
) -> None:
    rows = [[3 + (7 * i + t * t) % 17 for t in range(3 + i % 5)] for i in range(8)]
    # With a loss of 0 for each micro-batch, the gradient is that of the router loss.
    passes = []

    def loss(model: torch.nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        passes.append(len(micro))
        return LossOutput(0 * (token_logprobs(model, micro).logprob_N * micro["loss_mask"]).sum() / totals.tokens)

    results = []
    for packing, every, max_tokens in itertools.product((False, True), (1, 2), (1000, 12)):
        config = TrainConfig(learning_rate=1e-6, router_aux_loss_coef=coefficient, max_tokens=max_tokens)
        engine = open_engine(load_policy(experts, packing=packing), config)
        mask = [[i % every == 0] * len(row) for i, row in enumerate(rows)]
        passes.clear()
        metrics = engine.train_step(Batch.from_rows({"tokens": rows, "loss_mask": mask}), loss)
        # A split step with a coefficient first counts the tokens of each expert.
        assert (len(passes) > 2) == (max_tokens == 12)
        results.append({name: x for name, x in metrics.items() if name.startswith(LINEAR)})
    assert len(results[0]) == (7 if coefficient else 6)
    assert all(each == pytest.approx(results[0], rel=1e-5, abs=1e-9) for each in results)
    assert sum(results[0][f"expert_load_{e}"] for e in range(4)) == pytest.approx(4)
    if coefficient:
        assert results[0]["router_aux_loss"] == pytest.approx(expected(experts, [row[:-1] for row in rows]), rel=1e-5)
        assert results[0]["grad_norm"] > 1e-4


def test_a_collapsed_router_raises_an_alarm(experts: Path) -> None:
    model = load_policy(experts)
    batch = Batch.from_rows({"tokens": [[3 + (i + t) % 17 for t in range(9)] for i in range(8)]})
    alarms = Alarms(set())
    router = find_routers(model).modules[1]
    events = []
    for step, is_collapsed in enumerate((False, False, True, True), 1):
        if is_collapsed:
            # Equal logits: topk takes the same two experts for every token.
            torch.nn.init.zeros_(next(router.parameters()))
        engine = open_engine(model, TrainConfig(learning_rate=1e-9))
        metrics = engine.train_step(batch, policy_loss)
        events += alarms.look(step, {f"actor/{name}": value for name, value in metrics.items()})
    assert [(event.alarm, event.step) for event in events] == [("router", 4)]


def test_a_dense_model_has_no_router_loss(tmp_path: Path) -> None:
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(tmp_path)
    model = load_policy(tmp_path)
    assert not find_routers(model).modules

    def loss(*_: object) -> LossOutput:
        raise AssertionError

    engine: Any = None
    assert RouterLoss(model).added_to(loss, Batch.from_rows({"tokens": ROWS}), [], engine) is loss
