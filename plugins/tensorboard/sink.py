"""TensorBoard as a metric sink of a run."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.tracking.serialization import GrowingFile
from training.tracking.sinks import SinkContext


class TensorBoard:
    """Event files of TensorBoard. A resumed run adds a file, in which an entry tells TensorBoard which steps are
    repeated.

    Records are written one by one in the calling thread, so that a full disk raises an error there.
    """

    TITLE = "TensorBoard"
    run_id = None

    @classmethod
    def open(cls, context: SinkContext, folder: str | None = None) -> TensorBoard:
        """Open the sink of a run.

        Args:
            context: the run.
            folder: folder of the event files. Default: `tensorboard` in the run folder.
        """
        default = context.run_dir / "tensorboard"
        chosen = default
        if folder:
            chosen = Path(folder).expanduser()
        # A folder set by the user may have other runs, whose steps a new run must not make void.
        purge_step = None
        if chosen == default or context.resume_step > 0:
            purge_step = context.resume_step + 1
        return cls(chosen, purge_step)

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        """Open a new event file.

        Args:
            folder: folder of the event files; created if missing.
            purge_step: first step whose earlier records in the folder become void, or None.

        Raises:
            ImportError: TensorBoard is not installed. The message has the command that installs it.
        """
        try:
            # TensorBoard's own writer, because the one of torch would import torch in the driver.
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ImportError(
                f"{error}; `pip install tensorboard`, or `bash scripts/setup.sh tensorboard`, brings it"
            ) from error
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard finds files by the beginning of their names. Time and process keep those of several starts apart.
        name = f"events.out.tfevents.{time.time():.6f}.{platform.node()}.{os.getpid()}"
        self._records = RecordWriter(GrowingFile(folder / name))
        # TensorBoard rejects a file that does not begin with this record.
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
    # A bar or a line break in a response would end the cell.
    escaped = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped)
