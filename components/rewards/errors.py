"""Errors of rewards. The loop of every run knows them, whatever it imports of rewards besides."""


class RewardError(RuntimeError):
    """Too many responses have no reward; training would continue with made-up ones."""


class RefusedError(RewardError, ValueError):
    """A server answered what no new try would change; once somebody has mended it, a run can continue."""


class WrongCountError(ValueError):
    """A function for many responses that returned another number of rewards. Nobody can say which reward is whose."""
