"""Events for observers in the driver: starts and ends of calls, changes of the job, memory usage.

Observers also receive the events that workloads send with `BaseWorkload.emit`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallEvent:
    """Start (`seconds` is None) or end of one call.

    `began` is in seconds since the epoch. `bytes` is the approximate size of the arrays in the arguments. `seconds` is
    the duration.
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
    """Change of the job or of one of its processes.

    `kind` is one of "start", "lost", "replaced", "restart", "hung", "stop", "end". `time` is in seconds since the
    epoch.
    """

    kind: str
    time: float
    process: str = ""
    text: str = ""


@dataclass(frozen=True)
class MemoryEvent:
    """Memory usage of the job, sent about every ten seconds.

    `bytes` has the proportional set size of all processes of each role together, and of the driver as `DRIVER`. Roles
    that share processes have one entry, such as `ACTOR+ROLLOUT`. `time` is in seconds since the epoch.
    """

    time: float
    bytes: dict[str, int]


Observer = Callable[[Any], None]
