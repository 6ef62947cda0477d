"""Places at which a run waits for its test, so that what happens to it there happens at no other moment."""

from pathlib import Path


class Gate:
    """Shut once the run has left a trace in its folder, until it is opened."""

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
    """The definition of `is_shut()`, for files of reward functions and agents that are to wait while it is true."""
    places = [(str(gate.trace), str(gate.key)) for gate in gates]
    return f"""
import time
from pathlib import Path

def is_shut():
    return any(Path(trace).exists() and not Path(key).exists() for trace, key in {places})
"""
