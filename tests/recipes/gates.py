"""Gates at which a run waits for its test, so that a fault happens at a defined moment."""

from pathlib import Path


class Gate:
    """A gate is shut from the moment at which the run leaves a trace in its folder until it is opened."""

    def __init__(self, trace: Path, key: Path) -> None:
        """A gate that a run reaches by writing `trace` and that the file `key` opens."""
        self.trace, self.key = trace, key

    def is_reached(self) -> bool:
        """True if the run waits at this gate."""
        return self.trace.exists()

    def open(self) -> None:
        """Let the run continue."""
        self.key.touch()


def source(*gates: Gate) -> str:
    """Source code of `is_shut()`, for files of reward functions and agents that wait while it returns True."""
    places = [(str(gate.trace), str(gate.key)) for gate in gates]
    return f"""
import time
from pathlib import Path

def is_shut():
    return any(Path(trace).exists() and not Path(key).exists() for trace, key in {places})
"""
