"""Names of roles: the ones that reinforcement learning knows, and any name of the user's own."""

import re
from enum import StrEnum

_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


class Role(StrEnum):
    """A role's name, always in upper case: `Role("actor") is Role.ACTOR`, and `Role.ACTOR == "ACTOR"`.

    Iteration yields the roles of reinforcement learning. `Role("tool_server")` adds a member that iteration leaves out.

    Raises:
        ValueError: the name is no identifier, so that `RG_<ROLE>` could not be an attribute.
    """

    TRAINER = "TRAINER"
    ACTOR = "ACTOR"
    CRITIC = "CRITIC"
    ROLLOUT = "ROLLOUT"
    REWARD = "REWARD"
    REFERENCE = "REFERENCE"

    __repr__ = str.__repr__  # messages list roles

    @classmethod
    def _missing_(cls, value: object) -> "Role":
        upper = str(value).upper()
        if not _NAME.fullmatch(upper):
            raise ValueError(f"role name {value!r} is not a word of letters, digits and _; use one like 'tool_server'")
        role = str.__new__(cls, upper)
        role._name_ = role._value_ = upper
        return cls._value2member_map_.setdefault(upper, role)  # pyright: ignore[reportReturnType]

    @property
    def group_name(self) -> str:
        """The trainer's attribute for this role: `RG_ACTOR`."""
        return f"RG_{self}"
