"""Requests for another number of engines, as files in the run folder or as calls of a workload."""

from __future__ import annotations

import contextlib
import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from core.context import current

FOLDER = "engines"
"""Folder of the requests and of the reply, in the run folder."""
STATE = "state.json"
"""File with the current number of engines."""
RESIZE = "engines"
"""Kind of the message of a workload."""


@dataclass(frozen=True)
class FleetState:
    """Number of rollout engines of a run."""

    target: int
    """Requested number."""
    engines: tuple[str, ...]
    """Names of the running engines."""
    note: str = ""
    """Reason why the requested number is not reached."""
    requests: int = 0
    """Number of requests that the run has taken."""


def resize(engines: int) -> None:
    """Request a number of rollout engines, from inside a workload of the run. The call does not wait for them."""
    current().emit(RESIZE, engines)


def send_request(run_dir: Path, change: int) -> Path:
    """Request that engines are added, or removed if `change` is negative. Return the file, which the run removes."""
    folder = run_dir / FOLDER
    file = folder / f"request-{secrets.token_hex(4)}"
    # Renamed when it is complete, because the run may read it at any moment.
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"change": change}), encoding="utf-8")
    return part.rename(file.with_suffix(".json"))


def take_requests(run_dir: Path) -> list[int]:
    """Return the changes that were requested since the last call. A file that is no request is removed."""
    changes: list[int] = []
    for file in sorted((run_dir / FOLDER).glob("request-*.json"), key=lambda path: path.stat().st_mtime_ns):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            changes.append(int(json.loads(file.read_text(encoding="utf-8"))["change"]))
        file.unlink(missing_ok=True)
    return changes


def discard(run_dir: Path) -> None:
    """Remove the requests and the state of an earlier run."""
    take_requests(run_dir)
    (run_dir / FOLDER / STATE).unlink(missing_ok=True)


def write_state(run_dir: Path, state: FleetState) -> None:
    """Write the number of engines for `read_state`."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{STATE}.part"
    part.write_text(json.dumps(asdict(state)), encoding="utf-8")
    part.replace(folder / STATE)


def read_state(run_dir: Path) -> FleetState:
    """Return the number of engines of a run.

    Raises:
        OSError, ValueError: the run has no such file, or it is damaged.
    """
    values = json.loads((run_dir / FOLDER / STATE).read_text(encoding="utf-8"))
    return FleetState(int(values["target"]), tuple(values["engines"]), str(values["note"]), int(values["requests"]))
