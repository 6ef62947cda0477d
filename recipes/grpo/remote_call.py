"""Calls that involve several roles. A single role is called through the trainer's role groups, as in `RG_ACTOR.update`.

A call of your own is a function here, `def name(...): return RoleGroup(Role.ACTOR).call(name, ...)`, and a method of a
role that `@rpc(remote_call.name)` binds to it.
"""

from training.remote_call import sync_weights

__all__ = ["sync_weights"]
