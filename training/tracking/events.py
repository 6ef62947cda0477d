"""events.jsonl: the events of a run with their times, one JSON object per line. No event is buffered."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from pathlib import Path
from typing import Any

from training.tracking.redaction import redact
from training.tracking.serialization import LineFile, json_line, plain

logger = logging.getLogger(__name__)


class EventLog:
    """Observer that appends every event to a file. The first failure is logged as a warning and switches it off.

    A resumed run appends to the events of the earlier attempts.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the file, and create its folder. A failure is not raised; it switches the log off."""
        # Remembers the keys in environment variables. An error message that quotes one is then written without it.
        redact(os.environ)
        self.path = Path(path)
        self._lines: LineFile | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = LineFile(self.path)
        except OSError as error:
            self._switch_off(error)

    def __call__(self, event: Any) -> None:
        """Write the fields of an event, which is an instance of a dataclass, and the name of its class as `event`.

        `CallEvent` is written as "call", and `JobLost` as "job_lost". Fields with the metadata `logged: False` are left
        out. So are events whose `seconds` are None: they only mark the begin of a call or a phase.
        """
        # The event at the end of a call also holds the time of its begin, so nothing is lost.
        if self._lines is None or getattr(event, "seconds", 0.0) is None:
            return
        try:
            logged = {part.name for part in dataclasses.fields(event) if part.metadata.get("logged", True)}
            record = {name: value for name, value in dataclasses.asdict(event).items() if name in logged}
            self._lines.add(json_line({"event": event_name(type(event)), **plain(record)}))
        # Any error, such as a full disk or a value that cannot be serialized: a missing log must not end a training.
        except Exception as error:  # noqa: BLE001
            self._switch_off(error)

    def close(self) -> None:
        """Close the file. Later events are ignored."""
        lines, self._lines = self._lines, None
        if lines is None:
            return
        try:
            lines.close()
        # A network disk may report only now that it is full. Raised, the error would hide the one that ended the run.
        except OSError as error:
            logger.warning("%s may lack its last lines: %s", self.path, error)

    def _switch_off(self, error: Exception) -> None:
        self.close()
        logger.warning("%s is switched off: %s: %s", self.path, type(error).__name__, error)


def event_name(kind: type) -> str:
    """Return the name of events of a class in the file: "job_lost" for `JobLost`, "call" for `CallEvent`."""
    name = kind.__name__.removesuffix("Event") or kind.__name__
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
