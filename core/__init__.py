"""Roles, calls and jobs on Ray: declare how methods may be called, describe a job, and run it.

The names imported here are core's public API.
"""

# ruff: noqa: F401
# pyright: reportUnusedImport=false

from typing import TYPE_CHECKING

from core.context import Identity, WorkloadContext, info
from core.errors import JobError, ResultLost, WorkerDied, WorkerTimeout
from core.exports import Dispatch, nd_compute, replicate
from core.futures import Future, FutureSequence
from core.invocation import register, rpc, trainer_invocation
from core.job import Job, JobBuilder, RLJobBuilder
from core.members import Member
from core.observers import CallEvent, JobEvent, MemoryEvent, Observer
from core.plan import JobResult, Resource, RoleSpec
from core.role_group import RoleGroup, WorkerGroup, notify_job_end
from core.roles import Role
from core.supervise.control import beat
from core.trainer import BaseTrainer
from core.workload import BaseWorkload, export_rpc_method, export_verl_worker_rpc

__version__ = "0.1.0"
"""Version of the project. pyproject.toml reads it from here."""

DLJobBuilder = JobBuilder
"""DLRover's name of `JobBuilder`."""
RLRoleType = Role
"""DLRover's name of `Role`."""

if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts any name

    def __getattr__(name: str) -> object:
        from core.migration import alias_of

        # ImportError, because `from core import name` replaces the message of an AttributeError.
        if alias := alias_of("core", name, "core", ImportError):
            return globals()[alias]
        raise AttributeError(f"module 'core' has no attribute {name!r}")
