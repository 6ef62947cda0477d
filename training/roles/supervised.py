"""Role of the model that a supervised recipe trains."""

from typing import Generic, TypeVar

from torch import nn

from components.batch import Batch
from components.train.opening import open_engine
from core import trainer_invocation
from training.options.supervised_options import SupervisedOptions
from training.roles.trained_model import TrainedModel, of_rank0, policy_to_train

C = TypeVar("C", bound=SupervisedOptions)


class SupervisedModel(TrainedModel, Generic[C]):
    """One rank of the model. The subclass of a recipe declares its options, its `loss` and its evaluation."""

    config: C

    def load_model(self, path: str) -> nn.Module:
        """Return the model to train, without weights: the engine loads them. The default is a causal language model."""
        return policy_to_train(path, self.config)

    @trainer_invocation
    def load(self, model_path: str, steps: int) -> None:
        """Load the model into the training engine. `steps` is the length of the learning-rate schedule."""
        self.engine = open_engine(self.load_model(model_path), self.config.engine(steps))

    @trainer_invocation(post_func=of_rank0)
    def train_step(self, minibatch: Batch) -> dict[str, float]:
        """Run one optimizer step, split over the ranks. Send the mini-batch with `replicate`."""
        metrics = self.engine.train_step(minibatch, self.loss, group_size=self.config.GROUP_SIZE)
        self.record_weights(self.engine.step_count)
        return metrics
