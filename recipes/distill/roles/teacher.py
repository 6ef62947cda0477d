"""The role of the teacher: a frozen model that scores the tokens of the student."""

from functools import partial

from components.batch import Batch
from components.models.next_tokens import top_logprobs
from core import trainer_invocation
from training.roles.frozen import FrozenRank
from training.roles.reference import ReferenceWorker

from ..algorithm import to_columns
from ..config import DistillConfig


class Teacher(ReferenceWorker):
    """One instance of the teacher, which takes the place of a reference model."""

    config: DistillConfig  # pyright: ignore[reportIncompatibleVariableOverride]: it is only read

    @trainer_invocation(blocking=False, idempotent=True, post_func=Batch.concat)
    def logprobs(self, tokens: Batch) -> Batch:
        """Score each token at the sampling temperature.

        Returns:
            `teacher_logprob` [N] in nats, and with `algorithm.top_k` the columns of the K most likely tokens at each
            position: their ids `teacher_id` and their log-probabilities `teacher_top`.
        """
        count = self.config.algorithm.top_k
        compute = partial(top_logprobs, count=count, temperature=self.config.rollout.temperature)
        result_NC = self.engine.forward(tokens, compute)
        columns = {"teacher_logprob": result_NC[:, 0].contiguous()}
        columns |= to_columns(result_NC[:, 1 : 1 + count], "teacher_top")
        columns |= to_columns(result_NC[:, 1 + count :].int(), "teacher_id")
        return Batch(tokens.lengths, columns)


class TeacherRank(FrozenRank, Teacher):
    """One rank of a teacher that is sharded over several ranks."""

    @trainer_invocation(blocking=False, post_func=Batch.concat)
    def logprobs(self, tokens: Batch) -> Batch:
        """See `Teacher.logprobs`. Each rank gets a slice of the batch."""
        return super().logprobs(tokens)
