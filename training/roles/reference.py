"""Roles of the reference model: the frozen policy that the KL penalty is computed against."""

from functools import partial

from components.batch import Batch
from components.models.causal import policy_logprobs
from components.registry import load as load_plugin
from components.train.frozen import open_frozen_policy
from core import trainer_invocation
from training.options.rl_options import RLOptions
from training.roles.frozen import FrozenRank, FrozenWorker


class ReferenceWorker(FrozenWorker):
    """One instance of the reference model."""

    config: RLOptions

    @trainer_invocation(blocking=False, idempotent=True, replay="last")
    def load(self, model_path: str) -> None:
        """Load the model, which is never trained. A model that was loaded earlier is freed first."""
        # Without this, both models would be in memory while the new one loads.
        if hasattr(self, "engine"):
            del self.engine
        self.engine = open_frozen_policy(model_path, self.config.frozen_engine, self.config.model.attn_implementation)

    @trainer_invocation(blocking=False, idempotent=True, post_func=Batch.concat)
    def logprobs(self, tokens: Batch) -> Batch:
        """Return the column `reference_logprob` [N], in nats, at the sampling temperature."""
        compute = partial(policy_logprobs, temperature=self.config.rollout.temperature)
        return Batch(tokens.lengths, {"reference_logprob": self.engine.forward(tokens, compute)})

    @trainer_invocation(idempotent=True)
    def follow(self, policy: str, share: float, target: str) -> None:
        """Interpolate the weights towards those of a policy; the first instance saves the result.

        Args:
            policy: folder of the policy.
            share: weight of the policy in the result, from 0 to 1.
            target: folder that the result is saved to.
        """
        update = load_plugin("reference update", "follow", "algorithm.reference_sync_steps")
        update(self.engine, policy, share, target, writes=self.rank == 0)


class ReferenceRank(FrozenRank, ReferenceWorker):
    """One rank of a reference model that is sharded over several ranks."""

    @trainer_invocation(blocking=False, post_func=Batch.concat)
    def logprobs(self, tokens: Batch) -> Batch:
        """See `ReferenceWorker.logprobs`. Each rank gets a slice of the batch."""
        return super().logprobs(tokens)

    @trainer_invocation
    def follow(self, policy: str, share: float, target: str) -> None:
        """See `ReferenceWorker.follow`. Each rank updates its shards."""
        super().follow(policy, share, target)
