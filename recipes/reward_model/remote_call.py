"""What involves the job as a whole. Everything else goes through the trainer's role group, `self.RG_REWARD`."""

from core import Role, RoleGroup


def end_job() -> None:
    """Tell the ranks that no call will follow."""
    RoleGroup(Role.REWARD).call(end_job).result()
