"""Base classes of the roles of models that are not trained."""

from components.models.device import is_engine_dead
from components.train.process_group import init_process_group
from core import BaseWorkload


class FrozenWorker(BaseWorkload):
    """One instance of a frozen model."""

    def is_fatal(self, error: Exception) -> bool:
        """Return True for a dead engine or one that is out of memory. A new instance replaces it."""
        return is_engine_dead(error)


class FrozenRank(BaseWorkload):
    """One rank of a frozen model that is sharded over several ranks. List it before the class of an instance.

    The ranks run collective operations, so methods that compute are not idempotent.
    """

    def setup(self) -> None:
        """Initialize the process group of the ranks before a library creates another one."""
        self.setup_process_group(init_process_group)

    def is_fatal(self, error: Exception) -> bool:  # noqa: ARG002 - as of a workload
        """Return False: a restart of all ranks would raise the same error again."""
        return False
