"""The model that learns which response is better."""

from torch import nn

from components.batch import Batch
from components.models.causal import state_values
from components.models.value_model import load_value_model
from components.rl.aggregation import LossOutput, Totals
from core import trainer_invocation
from training.roles.supervised import SupervisedModel

from ..algorithm import at_the_end, loss
from ..config import RewardModelConfig


class Reward(SupervisedModel[RewardModelConfig]):
    """One rank of the model."""

    def load_model(self, path: str) -> nn.Module:
        """With a new head, unless it has one."""
        own, train = self.config.model, self.config.train
        model = load_value_model(
            path,
            gradient_checkpointing=train.gradient_checkpointing,
            seed=self.config.seed,
            attn_implementation=own.attn_implementation,
            value_head_prefix=own.value_head_prefix,
            packing=train.packing,
            empty=True,
        )
        model.backbone.config.pad_token_id = self.config.tokenizer(path).pad_token_id
        return model

    def loss(self, model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        """The loss of one micro-batch, see algorithm.py."""
        return loss(model, micro, totals, self.config.algorithm.margin_loss)

    @trainer_invocation(post_func=Batch.concat)
    def score(self, responses: Batch) -> Batch:
        """`score` of each sequence; the batch is split over the ranks."""
        score_N = self.engine.forward(responses.only("tokens"), state_values)
        return Batch(responses.lengths, {}, {"score": at_the_end(score_N, responses)})
