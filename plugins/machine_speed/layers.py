"""Seconds of a pass through a decoder, interpolated between small models that were measured.

A processor is slow on small products, and a pass has a fixed cost per layer. Both are in the measured seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

FORWARD, TRAIN, DECODE = "forward", "train", "decode"
"""Kinds of passes: log-probabilities, an optimizer step of one micro-batch, and one token for each row."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Measured seconds of one kind of pass with one width and one number of tokens."""

    parameters: int
    """Number of parameters of a layer."""
    tokens: int
    """Number of tokens of the pass."""
    layer_s: float
    """Seconds of a layer."""
    rest_s: float
    """Seconds of the pass outside of its layers and of the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Measured seconds of one kind of pass."""

    points: Sequence[Point]
    logit_s: float
    """Seconds of a logit: a token times an entry of the vocabulary."""

    @classmethod
    def from_json(cls, values: Any) -> Passes:
        """Return the passes of a decoded JSON object."""
        return cls(points=[Point(**point) for point in values["points"]], logit_s=float(values["logit_s"]))

    def seconds(self, *, parameters: int, layers: int, tokens: float, logits: float) -> float:
        """Return the expected seconds of a pass.

        Args:
            parameters: number of parameters of a layer of the model.
            layers: number of layers.
            tokens: number of tokens of the pass.
            logits: number of logits: tokens that are sampled or trained on, times the vocabulary.
        """
        layer = self._at("layer_s", parameters, tokens)
        rest = self._at("rest_s", parameters, tokens)
        return layers * layer + rest + self.logit_s * logits

    def _at(self, name: str, parameters: int, tokens: float) -> float:
        """Interpolate in the number of tokens for each width, then in the width. Both are logarithmic."""
        widths = sorted({point.parameters for point in self.points})
        at_width: list[tuple[float, float]] = []
        for width in widths:
            known = [(p.tokens, getattr(p, name)) for p in self.points if p.parameters == width]
            at_width.append((width, interpolated(sorted(known), tokens)))
        # The time outside of the layers does not grow with their size beyond the largest width.
        if name == "rest_s":
            parameters = min(parameters, widths[-1])
        return interpolated(at_width, parameters)


def interpolated(known: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate seconds linearly on logarithmic scales.

    Below the first point the seconds are constant, because they are overhead. Above the last one they are proportional
    to `x`, because the rate of products no longer grows.

    Args:
        known: pairs of a size and its seconds, by size.
        x: size at which the seconds are wanted.
    """
    first, last = known[0], known[-1]
    if x <= first[0]:
        return first[1]
    if x >= last[0]:
        return last[1] * x / last[0]
    left, right = next((a, b) for a, b in pairwise(known) if a[0] <= x <= b[0])
    share = math.log(x / left[0]) / math.log(right[0] / left[0])
    # A difference of two noisy measurements can be 0 or below.
    low, high = max(left[1], 1e-9), max(right[1], 1e-9)
    return math.exp((1 - share) * math.log(low) + share * math.log(high))


@dataclass(frozen=True, kw_only=True)
class EngineSpeed:
    """Measured seconds of the engines with one number of threads."""

    passes: dict[str, Passes] = field(default_factory=dict)
    """Passes by kind."""

    @classmethod
    def from_json(cls, values: Any) -> EngineSpeed:
        """Return the speed of a decoded JSON object."""
        return cls(passes={name: Passes.from_json(passes) for name, passes in values["passes"].items()})
