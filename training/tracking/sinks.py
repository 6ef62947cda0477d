"""The contract of metric sinks, and metrics.jsonl, the sink of every run.

A plug-in provides another sink as a `SinkType` of the kind "metric sink". Its name is a key of `LogOptions.sinks`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from training.tracking.serialization import LineFile, json_line, json_lines, write_whole

SINK = "metric sink"
"""Kind of the plug-ins that provide sinks."""


@dataclass(frozen=True)
class SinkContext:
    """The run that a sink is opened for."""

    run_dir: Path
    config: Mapping[str, Any]
    """Configuration of the run, with keys and tokens redacted."""
    environment: Mapping[str, Any]
    """Versions, git state and hardware, as in environment.json."""
    resume_step: int = 0
    """Step after which the run continues, or 0 for a new run."""
    run_id: str | None = None
    """`run_id` of the sink in the checkpoint that the run resumes from."""


class Sink(Protocol):
    """A destination of metrics."""

    @property
    def run_id(self) -> str | None:
        """Identifier that a resumed run needs to continue in the same record, or None. Checkpoints hold it."""
        ...

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of one step. They are plain values, and numbers may be infinite or NaN."""
        ...

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record the samples of one step. Rows hold plain values, and all rows have the same columns."""
        ...

    def close(self) -> None:
        """Send everything that is still buffered."""
        ...


class SinkType(Protocol):
    """Constructor of a sink that a plug-in provides."""

    TITLE: ClassVar[str]
    """Name of the sink in messages."""

    @classmethod
    def open(cls, context: SinkContext, **settings: Any) -> Sink:
        """Open the sink for a run. The settings are those of `LogOptions.sinks`."""
        ...


class JsonLines:
    """metrics.jsonl: one JSON object per step. Each line is written completely before `log` returns."""

    run_id = None

    def __init__(self, path: Path, resume_step: int) -> None:
        """Open the file, and remove the lines of steps that will be repeated."""
        # -1 without a resume: the run also repeats the evaluation before its first step, which is logged as step 0.
        last = resume_step or -1
        kept = [json.dumps(record) + "\n" for record in json_lines(path) if record.get("step", last + 1) <= last]
        write_whole(path, "".join(kept))
        self._lines = LineFile(path)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        # Step and time last, so that no metric of the same name replaces them.
        self._lines.add(json_line({**metrics, "step": step, "time": round(time.time(), 3)}))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: `rollouts/` holds all samples."""

    def close(self) -> None:
        self._lines.close()
