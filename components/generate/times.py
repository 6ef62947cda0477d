"""Times of the parts of generation, for engines that measure them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from components.generate.config import EVALUATION_STEP, SamplingConfig

T = TypeVar("T")
PARTS: tuple[str, ...] = ("prefill", "decode", "objects")
"""`prefill`: until the first tokens. `decode`: the following tokens. `objects`: everything else, such as requests,
outputs and batches."""


class GenerationTimes:
    """Seconds of each part of generation since the last `take`. The parts of a generation add up to its time."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._part: str | None = None
        """Part that is running, or None outside of a measured generation."""
        self._since = 0.0

    @contextmanager
    def generation(self, sampling: SamplingConfig) -> Iterator[None]:
        """Measure a generation. Those of evaluations are not measured, as they are outside of the steps."""
        if sampling.step == EVALUATION_STEP:
            yield
            return
        self._since = time.monotonic()
        self._part = "objects"
        try:
            yield
        finally:
            self._begin(None)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of the block to a part instead of the part around it. It counts only within `generation`."""
        outer = self._part
        if outer is None:
            yield
            return
        self._begin(part)
        try:
            yield
        finally:
            self._begin(outer)

    def timed(self, get_outputs: Callable[[], T], is_prefill: Callable[[T], bool]) -> Callable[[], T]:
        """Wrap a function that computes the next tokens. Its time is that of `prefill` or `decode`.

        Args:
            get_outputs: the function.
            is_prefill: True if the outputs hold the first token of a response.
        """

        def get_timed() -> T:
            with self.measure("decode"):
                outputs = get_outputs()
                if self._part is not None and is_prefill(outputs):
                    self._part = "prefill"
            return outputs

        return get_timed

    def take(self) -> dict[str, float]:
        """Return the seconds of all parts as `timing_s/generate_<part>`, and set them to 0."""
        seconds = {f"timing_s/generate_{part}": value for part, value in self._seconds.items()}
        self._seconds = dict.fromkeys(PARTS, 0.0)
        return seconds

    def _begin(self, part: str | None) -> None:
        now = time.monotonic()
        if self._part is not None:
            self._seconds[self._part] += now - self._since
        self._part = part
        self._since = now
