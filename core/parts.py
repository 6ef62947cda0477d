"""Answers that are passed on while they lie with the workers that made them: nobody between has to fetch them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.sharding import chunk_sizes, join

if TYPE_CHECKING:
    from core.members import Transport


@dataclass(frozen=True)
class Piece:
    """Items of one worker's answer, from `start` to `stop`."""

    reference: Any
    start: int
    stop: int
    length: int
    """How many items the whole answer must have, so that start and stop mean what they meant when it was asked for."""


@dataclass(frozen=True)
class Parts:
    """One argument of a call, in pieces; `resolve` fetches them where the call runs, and only there."""

    pieces: tuple[Piece, ...]
    name: str

    def resolve(self, transport: "Transport") -> Any:
        """The value.

        Raises:
            ValueError: an answer has another number of items than its call was given.
            BaseException: the error of the call that was to make it.
        """
        values = []
        for piece in self.pieces:
            transport.wait([piece.reference], None)
            found = transport.outcome(piece.reference)
            if found.error is not None:
                raise found.error
            value = found.value
            got = len(value) if hasattr(value, "__len__") else None
            if got != piece.length:
                raise ValueError(
                    f"{self.name} was given {piece.length} items and returned {type(value).__name__} of length {got}; "
                    "return one item for each, or pass on its result()"
                )
            values.append(value if piece.stop - piece.start == piece.length else value[piece.start : piece.stop])
        return values[0] if len(values) == 1 else join(values, self.name)


def spread(references: Sequence[Any], lengths: Sequence[int], workers: int, name: str) -> list[Parts]:
    """One argument for each of `workers` workers, cut as a list of the same length would be."""
    found, start = [], 0
    for size in chunk_sizes(sum(lengths), workers):
        pieces, offset = [], 0
        for reference, length in zip(references, lengths, strict=True):
            first, last = max(start, offset), min(start + size, offset + length)
            if first < last:
                pieces.append(Piece(reference, first - offset, last - offset, length))
            offset += length
        found.append(Parts(tuple(pieces), name))
        start += size
    return found


def resolved(
    args: tuple[Any, ...], kwargs: dict[str, Any], transport: "Transport"
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with every part fetched."""

    def fetch(value: Any) -> Any:
        return value.resolve(transport) if isinstance(value, Parts) else value

    return tuple(fetch(value) for value in args), {key: fetch(value) for key, value in kwargs.items()}
