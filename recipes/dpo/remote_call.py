"""What involves the job as a whole. Everything else goes through the trainer's role groups."""

from core import Role, RoleGroup


def end_job() -> None:
    """Tell all processes that no call will follow."""
    for role in (Role.ACTOR, Role.REFERENCE):
        RoleGroup(role).call(end_job).result()
