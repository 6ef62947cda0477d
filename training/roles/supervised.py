"""The model of a supervised recipe."""

from typing import Generic, TypeVar

from torch import nn

from components.batch import Batch
from components.train.opening import open_engine
from core import trainer_invocation
from training.options.supervised_options import SupervisedOptions
from training.roles.trained_model import TrainedModel, of_rank0, policy_to_train

C = TypeVar("C", bound=SupervisedOptions)


class SupervisedModel(TrainedModel, Generic[C]):
    """One rank of the model. A recipe's subclass declares its options, its `loss`, and what it evaluates."""

    config: C

    def load_model(self, path: str) -> nn.Module:
        """The model to train, whose weights the engine reads; here a causal one."""
        return policy_to_train(path, self.config)

    @trainer_invocation
    def load(self, model_path: str, steps: int) -> None:
        """Load the model and put it under the training engine; `steps` set the length of its schedule."""
        self.engine = open_engine(self.load_model(model_path), self.config.engine(steps))

    @trainer_invocation(post_func=of_rank0)
    def train_step(self, minibatch: Batch) -> dict[str, float]:
        """One optimizer step, of which every rank takes its share; send the mini-batch with `replicate`."""
        return self.engine.train_step(minibatch, self.loss, group_size=self.config.GROUP_SIZE)
