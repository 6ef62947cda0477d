"""Roles, calls and jobs on Ray: declare how a method may be called, describe what runs where, and run it."""

from core.config import Refused, describe_options, given_options, load_config, options_of
from core.context import Identity, Member, WorkloadContext, say
from core.errors import ConfigError, JobError, WorkerDied, WorkerTimeout
from core.futures import Future, FutureSequence
from core.invocation import replicate, rpc, trainer_invocation
from core.job import Job, JobBuilder, RLJobBuilder
from core.observers import CallEvent, JobEvent, Observer
from core.plan import JobResult, Resource, RoleSpec
from core.role_group import RoleGroup
from core.roles import Role
from core.trainer import BaseTrainer
from core.workload import BaseWorkload

__all__ = [
    "BaseTrainer",
    "BaseWorkload",
    "CallEvent",
    "ConfigError",
    "Future",
    "FutureSequence",
    "Identity",
    "Job",
    "JobBuilder",
    "JobError",
    "JobEvent",
    "JobResult",
    "Member",
    "Observer",
    "RLJobBuilder",
    "Refused",
    "Resource",
    "Role",
    "RoleGroup",
    "RoleSpec",
    "WorkerDied",
    "WorkerTimeout",
    "WorkloadContext",
    "describe_options",
    "given_options",
    "load_config",
    "options_of",
    "replicate",
    "rpc",
    "say",
    "trainer_invocation",
]
