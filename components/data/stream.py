"""The stream that every training loop reads its batches from. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class SampleStream(Generic[Item]):
    """Generates one batch of samples per training step, when the loop asks for it.

    `for batch in stream:` runs the steps that are left. Inside the loop's body `stream.step` is the number
    of the step at hand, from 1 to `steps`; a state saved there resumes with the step after it.
    """

    def __init__(
        self,
        generate: Callable[[int], Item | None],
        steps: int,
        queue_size: int = 0,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Set the stream before its first step.

        Args:
            generate: makes the samples of the step whose number it is given, first step 1; None when the data holds
                no more of them, which ends the stream before its `steps`, or when it was stopped on the way.
            steps: training steps in all, those before a resume included.
            queue_size: batches generated ahead of training; this version generates inline, which is 0.
            stopped: asked before each step; once it is true the iteration ends, with steps left.
        """
        if steps < 0:
            raise ValueError(f"steps={steps} is negative; set it to 0 or more")
        if queue_size != 0:
            raise ValueError(
                f"queue_size={queue_size}: asynchronous generation is not available yet in this version; "
                "set queue_size=0"
            )
        self._generate = generate
        self._stopped = stopped
        self.steps = steps
        self.step = 0
        """The step whose batch was handed out last; 0 before the first."""

    def __len__(self) -> int:
        """Count the steps that are left."""
        return max(self.steps - self.step, 0)

    def __iter__(self) -> Iterator[Item]:
        """Generate and hand out the batches of the steps that are left."""
        while self.step < self.steps and not self._stopped():
            # A step counts only once its samples are there: after a failure the same step is tried again.
            batch = self._generate(self.step + 1)
            if batch is None:
                if not self._stopped():
                    self.steps = self.step
                return
            self.step += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Give what `load_state_dict` needs."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the step at which the state was saved; more `steps` than before extend the run."""
        self.step = int(state["step"])
