"""Ranges of the values of a configuration, declared in annotations: `epochs: Count = 1`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints

from components.registry import names


@dataclass(frozen=True)
class Range:
    """Range of numbers, which never contains NaN. `str` completes an error message that ends in "set it"."""

    least: float = -math.inf
    """Inclusive minimum."""
    most: float = math.inf
    """Inclusive maximum."""
    above: float | None = None
    """Exclusive minimum."""
    below: float | None = None
    """Exclusive maximum."""
    also: float | None = None
    """Further value that is allowed, outside of the range."""

    def holds(self, value: Any) -> bool:
        """Return True if the number is in the range."""
        # For example 0 as "off" beside a range that begins at 1.
        if value == self.also:
            return True
        is_within = (self.above is None or value > self.above) and (self.below is None or value < self.below)
        return is_within and self.least <= value <= self.most

    def __str__(self) -> str:
        bounds = {"to at least": self.least, "above": self.above, "to at most": self.most, "below": self.below}
        finite = {text: bound for text, bound in bounds.items() if bound is not None and math.isfinite(bound)}
        text = " and ".join(f"{text} {bound:g}" for text, bound in finite.items())
        if self.also is not None:
            text += f", or to {self.also:g}"
        return text


@dataclass(frozen=True)
class OneOf:
    """Enumeration of allowed values."""

    known: tuple[object, ...]

    def holds(self, value: Any) -> bool:
        """Return True if the value is one of the allowed values."""
        return value in self.known

    def __str__(self) -> str:
        return f"to one of {', '.join(map(str, self.known))}"


@dataclass(frozen=True)
class NameOf:
    """Names of a kind of object: built-in names, and names of plug-ins."""

    kind: str
    """Kind in the registry, such as `train engine`."""
    basic: tuple[str, ...] = ()
    """Built-in names."""

    def holds(self, value: Any) -> bool:
        """Return True if the value is one of the names."""
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
    """Yield an error message for each field of a dataclass that is outside its `Range`, `OneOf` or `NameOf`.

    None is always accepted here; the type of the field decides about it.

    Args:
        options: instance of the dataclass.
        prefix: text before the name of the field.
    """
    for name, allowed in _allowed(type(options)).items():
        value = getattr(options, name)
        # None passes, because only fields whose type allows it can be None.
        if value is not None and not allowed.holds(value):
            yield f"{prefix}{name}={value}; set it {allowed}"


class Checked:
    """Base of dataclasses that raise a ValueError if a field is out of its range."""

    def __post_init__(self) -> None:
        if faults := list(out_of_range(self)):
            raise ValueError("; ".join(faults))


@functools.cache
def _allowed(schema: type) -> dict[str, Range | OneOf | NameOf]:
    allowed: dict[str, Range | OneOf | NameOf] = {}
    for name, hint in get_type_hints(schema, include_extras=True).items():
        for kind in (hint, *get_args(hint)):  # in `Count | None` the annotation is on a part of the type
            for part in getattr(kind, "__metadata__", ()):
                allowed[name] = part
    return allowed
