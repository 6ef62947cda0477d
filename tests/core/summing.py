"""A workload that exports a function of its module."""

from core import BaseWorkload, trainer_invocation


def total(values: list[int]) -> int:
    """Of what the workers return."""
    return sum(values)


class Summing(BaseWorkload):
    """Each worker counts for one."""

    @trainer_invocation(post_func=total)
    def one(self) -> int:
        """1."""
        return 1
