"""Remote calls that involve several roles. A single role is called by its role group, as in `RG_ACTOR.update`.

To add a call, define a function here, `def name(...): return RoleGroup(Role.ACTOR).call(name, ...)`, and bind a method
of the role to it with `@rpc(remote_call.name)`.
"""

from training.remote_call import sync_weights

__all__ = ["sync_weights"]
