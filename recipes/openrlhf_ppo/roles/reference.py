"""The reference model: a frozen policy, to which the KL is computed."""

from components.batch import Batch
from core import rpc
from training.roles import reference

from .. import remote_call


class Reference(reference.ReferenceWorker):
    """One instance of the reference model."""

    @rpc(remote_call.reference_init, idempotent=True, replay="last")
    def init_model(self, model_path: str) -> None:
        """Load the model. It is not trained."""
        self.load(model_path)

    @rpc(remote_call.reference_forward, idempotent=True)
    def forward(self, samples: Batch) -> Batch:
        """Compute the log-probability of each token at the sampling temperature."""
        return self.logprobs(samples)


class ReferenceRank(reference.ReferenceRank, Reference):
    """One rank of a sharded reference model."""

    @rpc(remote_call.reference_forward)
    def forward(self, samples: Batch) -> Batch:
        """See `Reference.forward`. Each rank receives a part of the batch."""
        return self.logprobs(samples)
