"""What involves the job as a whole. Everything else goes through the trainer's role group."""

from core import Role, RoleGroup


def end_job() -> None:
    """Tell all ranks that no call will follow."""
    RoleGroup(Role.ACTOR).call(end_job).result()
