"""Roles, calls and jobs on Ray: declare how a method may be called, describe what runs where, and run it.

What is imported here is what core offers.
"""

# ruff: noqa: F401
# pyright: reportUnusedImport=false

from typing import TYPE_CHECKING, NoReturn

from core.context import Identity, WorkloadContext, info
from core.control import beat
from core.errors import JobError, ResultLost, WorkerDied, WorkerTimeout
from core.exports import Dispatch, nd_compute, replicate
from core.futures import Future, FutureSequence
from core.invocation import register, rpc, trainer_invocation
from core.job import Job, JobBuilder, RLJobBuilder
from core.members import Member
from core.names import hint_after
from core.observers import CallEvent, JobEvent, MemoryEvent, Observer
from core.plan import JobResult, Resource, RoleSpec
from core.role_group import RoleGroup, WorkerGroup
from core.roles import Role
from core.trainer import BaseTrainer
from core.workload import BaseWorkload

DLJobBuilder = JobBuilder
"""DLRover's name."""
RLRoleType = Role
"""DLRover's name."""

if not TYPE_CHECKING:  # it would make every name right

    def __getattr__(name: str) -> NoReturn:
        if hint := hint_after("core", name):
            # `from core import name` would swallow an AttributeError's text.
            raise ImportError(f"core has no {name}{hint}", name="core")
        raise AttributeError(f"module 'core' has no attribute {name!r}")
