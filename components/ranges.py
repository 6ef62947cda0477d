"""What numbers of a configuration may be, said in their annotations: `epochs: Count = 1`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints

from components.registry import names


@dataclass(frozen=True)
class Range:
    """Numbers, as text what follows `set it`. NaN is in none."""

    least: float = -math.inf
    most: float = math.inf
    above: float | None = None
    below: float | None = None
    also: float | None = None
    """This, too."""

    def holds(self, value: Any) -> bool:
        """Whether the number is in it."""
        if value == self.also:
            return True
        is_within = (self.above is None or value > self.above) and (self.below is None or value < self.below)
        return is_within and self.least <= value <= self.most

    def __str__(self) -> str:
        words = {"to at least": self.least, "above": self.above, "to at most": self.most, "below": self.below}
        said = [f"{word} {bound:g}" for word, bound in words.items() if bound is not None and math.isfinite(bound)]
        return " and ".join(said) + ("" if self.also is None else f", or to {self.also:g}")


@dataclass(frozen=True)
class OneOf:
    """A few values."""

    known: tuple[object, ...]

    def holds(self, value: Any) -> bool:
        """Whether the value is one of them."""
        return value in self.known

    def __str__(self) -> str:
        return f"to one of {', '.join(map(str, self.known))}"


@dataclass(frozen=True)
class NameOf:
    """Names of a kind: basic ones, and those that plug-ins provide."""

    kind: str
    """Kind of the registry, such as `train engine`."""
    basic: tuple[str, ...] = ()

    def holds(self, value: Any) -> bool:
        """True if the value is one of the names."""
        return value in self.basic or value in names(self.kind)

    def __str__(self) -> str:
        known = dict.fromkeys([*self.basic, *names(self.kind)])
        return f"to one of {', '.join(known)}, or install a plug-in that provides the {self.kind} of that name"


Count = Annotated[int, Range(least=1)]
CountFromZero = Annotated[int, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(least=0, most=1)]
ShareAboveZero = Annotated[float, Range(above=0, most=1)]
ShareBelowOne = Annotated[float, Range(least=0, below=1)]
Seconds = Annotated[float, Range(above=0, below=math.inf)]


def out_of_range(options: Any, prefix: str = "") -> Iterator[str]:
    """Yield the faults of the fields of a dataclass that have a `Range`, `OneOf` or `NameOf`. None is allowed where the
    type has it.
    """
    for name, allowed in _allowed(type(options)).items():
        value = getattr(options, name)
        if value is not None and not allowed.holds(value):
            yield f"{prefix}{name}={value}; set it {allowed}"


class Checked:
    """A dataclass that refuses to be made with a field out of its range, with a ValueError."""

    def __post_init__(self) -> None:
        if faults := list(out_of_range(self)):
            raise ValueError("; ".join(faults))


@functools.cache
def _allowed(schema: type) -> dict[str, Range | OneOf | NameOf]:
    found: dict[str, Range | OneOf | NameOf] = {}
    for name, hint in get_type_hints(schema, include_extras=True).items():
        for kind in (hint, *get_args(hint)):  # in `Count | None` it is a part of the type
            for part in getattr(kind, "__metadata__", ()):
                found[name] = part
    return found
