"""The policy that is trained."""

from functools import partial
from typing import Generic, TypeVar

from components.batch import Batch
from components.engines.causal import policy_logprobs
from components.engines.opening import open_engine
from components.engines.weight_sync import WeightHandle
from core import rpc, trainer_invocation
from training import remote_call
from training.rl_options import RLOptions
from training.roles.trained_model import TrainedModel, of_rank0, policy_to_train

C = TypeVar("C", bound=RLOptions)


class PolicyWorker(TrainedModel, Generic[C]):
    """One rank of the policy. A recipe's subclass declares its options, and its `loss`."""

    config: C

    @trainer_invocation(blocking=False)
    def load(self, model_path: str, steps: int) -> None:
        """Load the model and put it under the training engine; `steps` set the length of its schedule."""
        self.engine = open_engine(policy_to_train(model_path, self.config), self.config.train_engine(steps))
        self.open_publisher(self.config.placement.nodes)

    @trainer_invocation(blocking=False, post_func=Batch.concat)
    def logprobs(self, tokens: Batch, temperature: float) -> Batch:
        """`logprob` per token, in nats; the batch is split over the ranks."""
        logprob_N = self.engine.forward(tokens, partial(policy_logprobs, temperature=temperature))
        return Batch(tokens.lengths, {"logprob": logprob_N})

    @trainer_invocation(blocking=False, post_func=Batch.concat)
    def reference_logprobs(self, tokens: Batch) -> Batch:
        """`reference_logprob` per token, in nats, at the sampling temperature: of the policy with its adapters off,
        which is what it was at the start.
        """
        compute = partial(policy_logprobs, temperature=self.config.rollout.temperature)
        return Batch(tokens.lengths, {"reference_logprob": self.engine.forward(tokens, compute, adapters=False)})

    @trainer_invocation(post_func=of_rank0)
    def update(self, experience: Batch, step: int) -> dict[str, float]:
        """Train on all of a step's responses; send them with `replicate`. Returns metrics, the same on every rank."""
        return self.train_epochs(experience, step, self.loss)

    @rpc(remote_call.publish_weights)
    def publish_weights(self, version: int) -> WeightHandle | None:
        """Rank 0 writes what all ranks gather."""
        return self.publish_parameters(version)

    @rpc(remote_call.end_job)
    def end(self) -> None:
        """Unlink the published weights."""
        self.close_publisher()
