"""Observers hear, in the driver, when each call to a workload begins and ends, what happens to the job, and whatever
workloads tell them with `BaseWorkload.emit`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallEvent:
    """One call, at its beginning (`seconds` is None) or at its end.

    `began` is in seconds since the epoch, `bytes` about the size of the arrays in its arguments.
    """

    job: str
    role: str
    rank: int
    method: str
    began: float
    bytes: int
    seconds: float | None = None
    failed: bool = False


@dataclass(frozen=True)
class JobEvent:
    """Something that happened to the job as a whole, or to one of its processes. `time`: seconds since the epoch.

    `kind` is one of "start", "lost", "replaced", "restart", "hung", "stop", "end".
    """

    kind: str
    time: float
    process: str = ""
    text: str = ""


@dataclass(frozen=True)
class MemoryEvent:
    """Proportional set sizes in bytes, about every ten seconds: of the processes of each role together, as `ACTOR` or
    `ACTOR+ROLLOUT` where roles share a process, and of `DRIVER`. `time`: seconds since the epoch.
    """

    time: float
    bytes: dict[str, int]


Observer = Callable[[Any], None]
