"""Names of roles: the ones that reinforcement learning knows, and any name of the user's own."""

import re

_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


class Role(str):
    """A role's name, always in upper case: `Role("actor") == Role.ACTOR == "ACTOR"`.

    Raises:
        ValueError: the name is no identifier, so that `RG_<ROLE>` could not be an attribute.
    """

    TRAINER: "Role"
    ACTOR: "Role"
    CRITIC: "Role"
    ROLLOUT: "Role"
    REWARD: "Role"
    REFERENCE: "Role"

    def __new__(cls, name: str) -> "Role":
        upper = str(name).upper()
        if not _NAME.fullmatch(upper):
            raise ValueError(f"role name {name!r} is not a word of letters, digits and _; use one like 'tool_server'")
        return super().__new__(cls, upper)

    @property
    def name(self) -> str:
        """The name as plain text: DLRover's and verl's roles are enums, and their users write `Role.ACTOR.name`."""
        return str(self)

    @property
    def group_name(self) -> str:
        """The trainer's attribute for this role: `RG_ACTOR`."""
        return f"RG_{self}"


for _known in Role.__annotations__:
    setattr(Role, _known, Role(_known))
