"""The role `reward`: the reward model that is trained."""

from torch import nn

from components.batch import Batch
from components.models.state_values import state_values
from components.models.value_model import load_value_model
from components.rl.aggregation import LossOutput, Totals
from core import trainer_invocation
from training.roles.supervised import SupervisedModel

from ..algorithm import at_the_end, loss
from ..config import RewardModelConfig


class Reward(SupervisedModel[RewardModelConfig]):
    """One rank of the model. Its base class has the engine and the optimizer step."""

    def load_model(self, path: str) -> nn.Module:
        """Load the model with its value head. A model without one gets a new head."""
        config = self.config
        model = load_value_model(
            path,
            gradient_checkpointing=bool(config.train.gradient_checkpointing),
            seed=config.seed,
            attn_implementation=config.model.attn_implementation,
            value_head_prefix=config.model.value_head_prefix,
            packing=config.train.packing,
            empty=True,
        )
        # Exported with the model: transformers finds the last token of a padded sequence by this id.
        model.backbone.config.pad_token_id = config.tokenizer(path).pad_token_id
        return model

    def loss(self, model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        """Return the loss of one micro-batch; see algorithm.py."""
        return loss(model, micro, totals, self.config.algorithm.margin_loss)

    @trainer_invocation(post_func=Batch.concat)
    def score(self, responses: Batch) -> Batch:
        """Return `score` [B] of each sequence. The batch is split over the ranks."""
        score_N = self.engine.forward(responses.only("tokens"), state_values)
        return Batch(responses.lengths, {}, {"score": at_the_end(score_N, responses)})
