"""Role names: the predefined roles of reinforcement learning, and user-defined ones."""

import re
from enum import StrEnum

_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


class Role(StrEnum):
    """Name of a role, always in upper case: `Role("actor") is Role.ACTOR`, and `Role.ACTOR == "ACTOR"`.

    Iteration yields the predefined roles. `Role("tool_server")` adds a member, which iteration does not yield.

    Raises:
        ValueError: the name is not an identifier, so `RG_<ROLE>` could not be an attribute.
    """

    TRAINER = "TRAINER"
    ACTOR = "ACTOR"
    CRITIC = "CRITIC"
    ROLLOUT = "ROLLOUT"
    REWARD = "REWARD"
    REFERENCE = "REFERENCE"

    __repr__ = str.__repr__  # otherwise lists of roles in messages would contain [<Role.ACTOR: 'ACTOR'>, ...]

    @classmethod
    def _missing_(cls, value: object) -> "Role":
        upper = str(value).upper()
        if not _NAME.fullmatch(upper):
            raise ValueError(f"role name {value!r} must consist of letters, digits and _, such as 'tool_server'")
        role = str.__new__(cls, upper)
        role._name_ = role._value_ = upper
        return cls._value2member_map_.setdefault(upper, role)  # pyright: ignore[reportReturnType]

    @property
    def group_name(self) -> str:
        """Name of the trainer's attribute for this role, such as `RG_ACTOR`."""
        return f"RG_{self}"
