"""The reference model: the frozen policy that the KL is measured to."""

from components.batch import Batch
from core import rpc
from training.roles import reference

from .. import remote_call


class Reference(reference.ReferenceWorker):
    """One instance of the reference model."""

    @rpc(remote_call.reference_init, idempotent=True, replay="last")
    def init_model(self, model_path: str) -> None:
        """Load; nothing of it is ever trained."""
        self.load(model_path)

    @rpc(remote_call.reference_forward, idempotent=True)
    def forward(self, samples: Batch) -> Batch:
        """Log-probabilities at the sampling temperature."""
        return self.logprobs(samples)


class ReferenceRank(reference.ReferenceRank, Reference):
    """One rank of a reference model that is sharded over them."""

    @rpc(remote_call.reference_forward)
    def forward(self, samples: Batch) -> Batch:
        """See `Reference.forward`; every rank has a part."""
        return self.logprobs(samples)
