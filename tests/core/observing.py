"""Observers for the tests of core."""

import os
from pathlib import Path

from core import CallEvent, Observer, WorkloadContext


def to_file(context: WorkloadContext) -> Observer:
    """Writes a line per event."""

    def write(event: CallEvent) -> None:
        with Path(os.environ["TROUPE_TEST_EVENTS"]).open("a") as file:
            ends = "begins" if event.seconds is None else "ends"
            file.write(f"{event.role} {event.rank} {event.method} {event.bytes} {ends}\n")

    return write


def broken(context: WorkloadContext) -> Observer:
    """Raises at each event."""

    def fail(event: CallEvent) -> None:
        raise OSError("disk full")

    return fail
