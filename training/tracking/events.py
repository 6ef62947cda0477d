"""events.jsonl: what happened when, one JSON object to a line, written at once."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from training.tracking.plain import LineFile, json_line, plain
from training.tracking.redaction import redact

logger = logging.getLogger(__name__)

_ALARM_LINE = '{"event": "alarm"'
"""How such a line begins: `event` is its first field."""


class EventLog:
    """Appends every event that it is called with. After its first failure it says so once, and is off.

    Several processes may append to one file; each line is a single write. A resumed run continues behind what is there.
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

    def alarms(self) -> set[str]:
        """Names of the alarms that the file holds, of whichever start of the run."""
        found: set[str] = set()
        try:
            with self.path.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if line.startswith(_ALARM_LINE):
                        # Half a line of a killed process names none, nor does somebody's own class of that name.
                        with contextlib.suppress(ValueError):
                            found.add(str(json.loads(line).get("alarm")))
        except OSError as error:
            logger.debug("no alarms are known: %s", error)
        return found

    def close(self) -> None:
        """Write nothing more."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _switch_off(self, error: Exception) -> None:
        self.close()
        logger.warning("%s is switched off: %s: %s", self.path, type(error).__name__, error)


def event_name(kind: type) -> str:
    """The name under which events of a class are written: `JobLost` as "job_lost", `CallEvent` as "call"."""
    name = kind.__name__.removesuffix("Event") or kind.__name__
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
