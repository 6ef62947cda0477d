"""Remote calls that involve several roles. This recipe has one role and needs none; its role group is enough.

To add a call, define a function here, `def name(...): return RoleGroup(Role.ACTOR).call(name, ...)`, and bind a method
of the role to it with `@rpc(remote_call.name)`.
"""
