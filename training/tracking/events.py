"""events.jsonl: what happened when, one JSON object to a line, written at once."""

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
    """Appends every event that it is called with. After its first failure it says so once, and is off.

    A resumed run continues behind what is there.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the file, with its folder; a failure switches the log off and does not raise."""
        redact(os.environ)  # so that no key that stands there is written
        self.path = Path(path)
        self._lines: LineFile | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = LineFile(self.path)
        except OSError as error:
            self._switch_off(error)

    def __call__(self, event: Any) -> None:
        """Write one event, an instance of any dataclass: its fields, and `event`, the name of its class.

        `CallEvent` is written as "call", `JobLost` as "job_lost". One whose `seconds` are None has only begun, and is
        left out; so is a field whose metadata say `logged: False`.
        """
        # The end of a call tells its beginning too.
        if self._lines is None or getattr(event, "seconds", 0.0) is None:
            return
        try:
            logged = {part.name for part in dataclasses.fields(event) if part.metadata.get("logged", True)}
            record = {name: value for name, value in dataclasses.asdict(event).items() if name in logged}
            self._lines.add(json_line({"event": event_name(type(event)), **plain(record)}))
        # A full disk, a value that cannot be read: the run continues whatever it is.
        except Exception as error:  # noqa: BLE001
            self._switch_off(error)

    def close(self) -> None:
        """Write nothing more."""
        lines, self._lines = self._lines, None
        if lines is None:
            return
        try:
            lines.close()
        # A network disk reports here that it is full. What ended the run has to be read, and not this.
        except OSError as error:
            logger.warning("%s may lack its last lines: %s", self.path, error)

    def _switch_off(self, error: Exception) -> None:
        self.close()
        logger.warning("%s is switched off: %s: %s", self.path, type(error).__name__, error)


def event_name(kind: type) -> str:
    """The name under which events of a class are written: `JobLost` as "job_lost", `CallEvent` as "call"."""
    name = kind.__name__.removesuffix("Event") or kind.__name__
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
