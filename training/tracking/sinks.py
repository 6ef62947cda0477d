"""Where metrics go: metrics.jsonl always, TensorBoard when asked for. W&B has a file of its own."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from training.tracking.serialization import GrowingFile, LineFile, json_line, json_lines, write_whole


class Sink(Protocol):
    """One place that metrics go to."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of one step: plain values; numbers may be infinite or NaN."""
        ...

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the samples of one step: rows of plain values, each with the columns of the first."""
        ...

    def close(self) -> None:
        """Send what is still held back."""
        ...


class JsonLines:
    """metrics.jsonl: one JSON object per step; every line is whole once `log` returns."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """Open the file, without the lines of steps that are done again."""
        # A run that begins anew writes what it measures before its first step again, too.
        last = resume_step if resume_step > 0 else -1
        kept = [json.dumps(record) + "\n" for record in json_lines(path) if record.get("step", last + 1) <= last]
        write_whole(path, "".join(kept))
        self._lines = LineFile(path)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._lines.add(json_line({**metrics, "step": step, "time": round(time.time(), 3)}))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Pass them over: `rollouts` has it all."""

    def close(self) -> None:
        self._lines.close()


class TensorBoard:
    """TensorBoard's event files. A resumed run adds one, which tells TensorBoard what steps are done again.

    Records are written one by one in this thread, so that a full disk is noticed where it can be told.
    """

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        """Open a new event file.

        Args:
            folder: where TensorBoard looks; made if missing.
            purge_step: whatever the folder holds of this step and later ones is void; None: nothing is.

        Raises:
            ImportError: TensorBoard is not installed; the message says how it is.
        """
        try:
            # TensorBoard's own writer; torch's would bring torch.
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ImportError(
                f"{error}; `pip install tensorboard`, or `bash scripts/setup.sh tensorboard`, brings it"
            ) from error
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{platform.node()}.{os.getpid()}"
        self._records = RecordWriter(GrowingFile(folder / name))
        self._write(file_version="brain.Event:2")
        if purge_step is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(step=purge_step, session_log=start)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = [self._summaries.Summary.Value(tag=tag, simple_value=number) for tag, number in _numbers(metrics)]
        self._write(step=step, summary=self._summaries.Summary(value=values))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.types_pb2 import DT_STRING  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.plugins.text import metadata

        text = TensorProto(dtype=DT_STRING, string_val=[_markdown_table(rows).encode()])
        about = metadata.create_summary_metadata(display_name="samples", description="")
        value = self._summaries.Summary.Value(tag="samples/text_summary", metadata=about, tensor=text)
        self._write(step=step, summary=self._summaries.Summary(value=[value]))

    def close(self) -> None:
        self._records.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())


def _numbers(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (bool, int, float)):
            yield f"{prefix}{name}", float(value)


def _markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(rows[0])
    cells = [columns, ["---"] * len(columns), *([str(row.get(name, "")) for name in columns] for row in rows)]
    escaped = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
