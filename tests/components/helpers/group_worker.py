"""Work of a rank in the tests of groups: training on pairs in several ways. Tests read the records.

P pairs; B = 2P sequences, chosen and rejected in turn.
"""

from typing import Any

import torch
from torch import nn

from components.batch import Batch
from components.models.state_values import state_values
from components.models.value_model import load_value_model
from components.rl.aggregation import LossOutput, Totals
from components.rl.preference_losses import bradley_terry_loss
from components.train.opening import open_engine
from tests.components.helpers.train_cases import config, weights

CASES: dict[str, dict[str, Any]] = {
    "deepspeed": {"zero_stage": 1, "max_tokens": 10**6},
    "small budget": {"zero_stage": 1, "max_tokens": 30},
    "one pair": {"zero_stage": 1, "max_tokens": 1},
    "few sequences": {"zero_stage": 1, "max_tokens": 10**6, "max_sequences": 5},
    "packing": {"zero_stage": 1, "max_tokens": 30, "packing": True},
    "fsdp": {"engine": "fsdp", "zero_stage": 3, "max_tokens": 30},
}


def minibatches() -> list[Batch]:
    """Return mini-batches of 7, 4 and 1 pairs.

    Two ranks get unequal shares, and the second rank gets none of the last mini-batch.
    """
    generator = torch.Generator().manual_seed(5)
    batches = []
    for pairs in (7, 4, 1):
        lengths_B = torch.randint(1, 10, (2 * pairs,), generator=generator)
        tokens_N = torch.randint(2, 20, (int(lengths_B.sum()),), generator=generator)
        batches.append(Batch(lengths_B, {"tokens": tokens_N}, {"pair": torch.arange(pairs).repeat_interleave(2)}))
    return batches


def trained(model_folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Train, then pass an incomplete pair. Return the weights and the pairs of each pass."""
    model = load_value_model(model_folder, packing=changes.get("packing", False))
    engine = open_engine(model, config(**changes))
    passes: list[list[int]] = []
    refused = "no error"

    def loss(model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        passes.append(micro["pair"].tolist())
        score_P2 = state_values(model, micro)[micro.offsets[1:] - 1].view(-1, 2)
        return bradley_terry_loss(score_P2[:, 0], score_P2[:, 1], totals.sequences / 2)

    metrics = [engine.train_step(minibatch, loss, group_size=2) for minibatch in minibatches()]
    try:
        engine.train_step(minibatches()[0].select(slice(0, 5)), loss, group_size=2)
    except ValueError as error:
        refused = str(error)
    return {"metrics": metrics, "weights": weights(engine), "passes": passes, "refused": refused}


def trained_on_pairs(model_folder: str) -> dict[str, Any]:
    """Return the training record of each case."""
    return {case: trained(model_folder, changes) for case, changes in CASES.items()}
