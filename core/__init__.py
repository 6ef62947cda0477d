"""Roles, calls and jobs on Ray: declare how a method may be called, describe what runs where, and run it."""

from typing import TYPE_CHECKING, NoReturn

from core.context import Identity, WorkloadContext, info
from core.errors import JobError, ResultLost, WorkerDied, WorkerTimeout
from core.exports import replicate
from core.futures import Future, FutureSequence
from core.invocation import rpc, trainer_invocation
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
RLRoleType = Role
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
    "RLRoleType",
    "Resource",
    "ResultLost",
    "Role",
    "RoleGroup",
    "RoleSpec",
    "RunningJob",
    "WorkerDied",
    "WorkerGroup",
    "WorkerTimeout",
    "WorkloadContext",
    "info",
    "nd_compute",
    "register",
    "replicate",
    "rpc",
    "trainer_invocation",
]


if not TYPE_CHECKING:  # it would make every name right

    def __getattr__(name: str) -> NoReturn:
        if hint := hint_after("core", name):
            # `from core import name` would swallow an AttributeError's text.
            raise ImportError(f"core has no {name}{hint}", name="core")
        raise AttributeError(f"module 'core' has no attribute {name!r}")
