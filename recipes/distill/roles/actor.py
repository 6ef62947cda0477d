"""The role `actor`: the student, which is trained."""

from torch import Tensor, nn

from components.batch import Batch
from components.models.next_tokens import candidate_logprobs
from components.rl.aggregation import LossOutput, Totals
from core import trainer_invocation
from training.roles.policy import PolicyWorker

from ..algorithm import from_columns, policy_loss, to_columns
from ..config import DistillConfig


class Actor(PolicyWorker[DistillConfig]):
    """One rank of the student. Its base class has the engine, the update and the weight sync."""

    def loss(self, model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        """Return the loss of one micro-batch; see algorithm.py."""
        return policy_loss(model, micro, totals, self.config)

    @trainer_invocation(blocking=False, post_func=Batch.concat)
    def student_top(self, tokens: Batch) -> Batch:
        """Return the columns of `student_top`: the log-probabilities of the candidates in `teacher_id`, in nats."""
        count = self.config.algorithm.top_k

        def compute(model: nn.Module, micro: Batch) -> Tensor:
            ids_NK = from_columns(micro, "teacher_id", count)
            return candidate_logprobs(model, micro, ids_NK, self.config.rollout.temperature)

        return Batch(tokens.lengths, to_columns(self.engine.forward(tokens, compute), "student_top"))
