"""A workload that exports a function of its module."""

from core import BaseWorkload, trainer_invocation


def total(values: list[int]) -> int:
    """Return the sum of the workers' results."""
    return sum(values)


class Summing(BaseWorkload):
    """A workload whose group call returns the number of workers."""

    @trainer_invocation(post_func=total)
    def one(self) -> int:
        """Return 1."""
        return 1
