"""Roles, calls and jobs on Ray: declare how a method may be called, describe what runs where, and run it."""

from typing import NoReturn

from core.context import Identity, WorkloadContext, info
from core.errors import JobError, WorkerDied, WorkerTimeout
from core.futures import Future, FutureSequence, as_completed
from core.invocation import replicate, rpc, trainer_invocation
from core.job import Job, JobBuilder, RLJobBuilder, RunningJob
from core.members import Member
from core.names import hint_after
from core.observers import CallEvent, JobEvent, MemoryEvent, Observer
from core.plan import JobResult, Resource, RoleSpec
from core.role_group import RoleGroup
from core.roles import Role
from core.trainer import BaseTrainer
from core.worker_group import Dispatch, WorkerGroup, nd_compute, register
from core.workload import BaseWorkload

DLJobBuilder = JobBuilder
"""DLRover's name."""

__all__ = [
    "BaseTrainer",
    "BaseWorkload",
    "CallEvent",
    "DLJobBuilder",
    "Dispatch",
    "Future",
    "FutureSequence",
    "Identity",
    "Job",
    "JobBuilder",
    "JobError",
    "JobEvent",
    "JobResult",
    "Member",
    "MemoryEvent",
    "Observer",
    "RLJobBuilder",
    "Resource",
    "Role",
    "RoleGroup",
    "RoleSpec",
    "RunningJob",
    "WorkerDied",
    "WorkerGroup",
    "WorkerTimeout",
    "WorkloadContext",
    "as_completed",
    "info",
    "nd_compute",
    "register",
    "replicate",
    "rpc",
    "trainer_invocation",
]


def __getattr__(name: str) -> NoReturn:
    if hint := hint_after("core", name):
        # `from core import name` would swallow an AttributeError's text.
        raise ImportError(f"core has no {name}{hint}", name="core")
    raise AttributeError(f"module 'core' has no attribute {name!r}")
