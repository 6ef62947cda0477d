"""Small calculations that the modules of the plan share."""

from __future__ import annotations

from components.train.config import product_type, weight_type

WIDTH = {"float32": 4, "bfloat16": 2}
"""Number of bytes of a value, by dtype."""


def amount_if(condition: object, amount: int | None) -> int:
    """Return `amount` if the condition holds, otherwise 0. An unknown amount (None) counts as 0."""
    return (amount or 0) if condition else 0


def weight_width(precision: str) -> int:
    """Return the number of bytes of a weight in a pass of this precision."""
    return WIDTH[weight_type(precision)]


def product_width(precision: str) -> int:
    """Return the number of bytes of a value in the matrix products of this precision."""
    return WIDTH[product_type(precision)]
