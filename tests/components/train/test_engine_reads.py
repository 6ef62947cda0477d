"""Reads of the device in a training step, each of which makes the host wait for a GPU.

N: all tokens of a micro-batch end to end.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from components.batch import Batch
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.models.packing.layout import layout_of
from components.models.state_values import token_values
from components.models.value_model import load_value_model
from components.rl.aggregation import Aggregation, LossOutput, TokenLoss, Totals, reduce_loss
from components.rl.exploration import entropy_loss
from components.rl.policy_losses import gspo_loss, ppo_loss
from tests.components.helpers import train_cases as cases
from tests.components.helpers.device_reads import MetaEngine, counted_reads

MAX_TOKENS = 60


@pytest.fixture(autouse=True)
def linear_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo DeepSpeed's replacement of `linear`, which an engine with ZeRO 3 leaves behind in its process."""
    monkeypatch.setattr(torch.nn.functional, "linear", vars(torch._C)["_nn"].linear)


def groups() -> Batch:
    """Four prompts of 8 tokens with four responses each, of 2 to 5 tokens."""
    generator = torch.Generator().manual_seed(0)
    rows: list[list[int]] = []
    masks: list[list[bool]] = []
    for _ in range(4):
        prompt = torch.randint(2, 20, (8,), generator=generator).tolist()
        for size in torch.randint(2, 6, (4,), generator=generator).tolist():
            rows.append(prompt + torch.randint(2, 20, (size,), generator=generator).tolist())
            masks.append([False] * 8 + [True] * size)
    batch = Batch.from_rows({"tokens": rows, "action_mask": masks})
    number_N = torch.rand(batch.num_tokens, generator=generator)
    return batch.with_tokens(advantage=number_N - 0.5, logprob=-number_N)


def policy_loss(
    model: nn.Module, micro: Batch, totals: Totals, aggregation: Aggregation, is_sequence: bool
) -> LossOutput:
    output = token_logprobs(model, micro, 0.7, with_entropy=True, mask="action_mask")
    assert output.entropy_N is not None
    mask_N = micro["action_mask"]
    columns = output.logprob_N, micro["logprob"], micro["advantage"], mask_N
    if is_sequence:
        loss = gspo_loss(*columns, micro.lengths, clip_low=0.1, clip_high=0.1)
    else:
        loss = ppo_loss(*columns, clip_low=0.1, clip_high=0.1)
    entropy = entropy_loss(output.entropy_N, mask_N)
    total = TokenLoss(loss.loss_N + 0.01 * entropy.loss_N, loss.metrics | entropy.metrics)
    return reduce_loss(total, mask_N, micro.lengths, totals, aggregation)


def value_loss(model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
    error_N: Tensor = token_values(model, micro) - micro["advantage"]
    return reduce_loss(TokenLoss(error_N.square()), micro["action_mask"], micro.lengths, totals)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    ("aggregation", "is_sequence"),
    [("token-mean", False), ("seq-mean-token-mean", True), ("seq-mean-token-sum", False)],
)
def test_a_step_of_a_policy_reads_the_device_once(
    tied_model: Path, packing: bool, aggregation: Aggregation, is_sequence: bool
) -> None:
    """Metrics and the norm of the gradient come in one transfer, and no micro-batch reads anything."""
    model = load_policy(tied_model, packing=packing)
    engine = MetaEngine(model, cases.config(max_tokens=MAX_TOKENS))
    (plan,) = layout_of(model).micro_batches_by_rank(groups(), 1, MAX_TOKENS)
    assert len(plan) >= 2
    with counted_reads() as reads:
        metrics = engine.train_step(groups(), partial(policy_loss, aggregation=aggregation, is_sequence=is_sequence))
    assert reads.counts == {"tolist": 1}
    assert metrics["grad_norm"] == metrics["entropy"] == 1.0


@pytest.mark.parametrize("packing", [True, False])
def test_a_step_of_a_critic_reads_the_device_once(tied_model: Path, packing: bool) -> None:
    engine = MetaEngine(load_value_model(tied_model, packing=packing), cases.config(max_tokens=MAX_TOKENS))
    with counted_reads() as reads:
        engine.train_step(groups(), value_loss)
    assert reads.counts == {"tolist": 1}


def test_reads_are_counted() -> None:
    with counted_reads() as reads:
        x = torch.ones(3, device="meta")
        assert int(x.sum()) == 1
        assert (x > 0).tolist() == [True] * 3
        with pytest.raises(NotImplementedError):
            x.nonzero()
        with pytest.raises(NotImplementedError):
            x[x > 0]
    assert reads.counts == {"__int__": 1, "tolist": 1}
