"""The reference model: the frozen policy that the KL is measured to."""

from functools import partial

from components.batch import Batch
from components.models.causal import policy_logprobs
from components.train.frozen import open_frozen_policy
from core import trainer_invocation
from training.options.rl_options import RLOptions
from training.roles.frozen import FrozenRank, FrozenWorker


class ReferenceWorker(FrozenWorker):
    """One instance of the reference model."""

    config: RLOptions

    @trainer_invocation(blocking=False, idempotent=True, replay="last")
    def load(self, model_path: str) -> None:
        """Load; nothing of it is ever trained. What was loaded before is let go of first."""
        if hasattr(self, "engine"):
            del self.engine
        self.engine = open_frozen_policy(model_path, self.config.frozen_engine, self.config.model.attn_implementation)

    @trainer_invocation(blocking=False, idempotent=True, post_func=Batch.concat)
    def logprobs(self, tokens: Batch) -> Batch:
        """`reference_logprob` per token, in nats, at the sampling temperature; split over the instances."""
        compute = partial(policy_logprobs, temperature=self.config.rollout.temperature)
        return Batch(tokens.lengths, {"reference_logprob": self.engine.forward(tokens, compute)})

    @trainer_invocation(idempotent=True)
    def follow(self, policy: str, share: float, target: str) -> None:
        """Move towards the policy in a folder, by this share of the way; the first writes what comes of it."""
        self.engine.mix(policy, share)
        self.engine.save_hf(target, writes=self.rank == 0)


class ReferenceRank(FrozenRank, ReferenceWorker):
    """One rank of a reference model that is sharded over them; they compute together."""

    @trainer_invocation(blocking=False, post_func=Batch.concat)
    def logprobs(self, tokens: Batch) -> Batch:
        """See `ReferenceWorker.logprobs`; every rank has a part."""
        return super().logprobs(tokens)

    @trainer_invocation
    def follow(self, policy: str, share: float, target: str) -> None:
        """See `ReferenceWorker.follow`; every rank moves what it keeps."""
        super().follow(policy, share, target)
