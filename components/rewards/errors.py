"""Errors of rewards. The loop of every run knows them, whatever it imports of rewards besides."""


class RewardError(RuntimeError):
    """Raised if too many responses have no reward."""


class RefusedError(RewardError, ValueError):
    """Raised for a reply of a server that a retry would not change. The run can be resumed after a correction."""


class WrongCountError(ValueError):
    """Raised if a function returns another number of rewards than responses, so that they cannot be assigned."""
