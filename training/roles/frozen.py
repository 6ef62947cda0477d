"""What every role of a model that is not trained does."""

from components.models.device import is_engine_dead
from components.train.process_group import init_process_group
from core import BaseWorkload


class FrozenWorker(BaseWorkload):
    """One instance of a model."""

    def is_fatal(self, error: Exception) -> bool:
        """See `BaseWorkload.is_fatal`: a new instance takes the place of one that is dead or out of memory."""
        return is_engine_dead(error)


class FrozenRank(BaseWorkload):
    """Before the class of an instance: one rank of a model that is sharded over them. They compute together, so no
    method in which they do is idempotent.
    """

    def setup(self) -> None:
        """Meet the other ranks before any library can make a process group of its own."""
        self.setup_process_group(init_process_group)

    def is_fatal(self, error: Exception) -> bool:  # noqa: ARG002 - as of a workload
        """See `BaseWorkload.is_fatal`: all ranks would start again, and meet the same error."""
        return False
