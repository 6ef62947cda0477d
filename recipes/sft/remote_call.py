"""No call involves several roles: there is one, and it is called through the trainer's role group.

A call of your own is a function here, `def name(...): return RoleGroup(Role.ACTOR).call(name, ...)`, and a method of a
role that `@rpc(remote_call.name)` binds to it.
"""
