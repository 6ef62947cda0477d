"""The tracker, which records one run in its folder and in metric sinks."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from components.registry import find, load
from training.tracking.event_types import StepEvent
from training.tracking.redaction import hide_in_text, redact
from training.tracking.serialization import plain, write_whole
from training.tracking.sinks import SINK, JsonLines, Sink, SinkContext, SinkType
from training.tracking.summary import begin_summary, check_fields, merge_summary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.batch import Batch

logger = logging.getLogger(__name__)

ROLLOUTS = "rollouts/step_{step:06d}.parquet"
"""File of the rollouts that a step was trained on."""
UNREWARDED = "failed/step_{step:06d}-rewards.parquet"
"""File of the rollouts of a step that were excluded because they have no reward."""


class Tracker:
    """Records one run. It runs in the process of the trainer, and no other process writes these files meanwhile."""

    def __init__(
        self,
        run_dir: str | Path,
        recipe: str,
        config: Any,
        seed: int,
        *,
        sinks: Mapping[str, Mapping[str, Any]] | None = None,
        resume_step: int = 0,
        state: Mapping[str, Any] | None = None,
        emit: Callable[[Any], object] = lambda _: None,
        shown: Sequence[str] = (),
    ) -> None:
        """Open the files of the run, and write its configuration and environment.

        Args:
            run_dir: run folder. It is created if it does not exist.
            recipe: name of the recipe, for the summary.
            config: a mapping or dataclass. Keys and tokens are redacted in the file.
            seed: seed of the run, for the summary.
            sinks: settings of the metric sinks of plug-ins, by name of the sink, such as `{"tensorboard": {}}`. By
                default metrics are only written to metrics.jsonl.
            resume_step: step after which the run continues, or 0 for a new run. Metrics and rollouts of later steps are
                removed, because the run repeats these steps.
            state: `state_dict()` of the tracker in the checkpoint. With it, a sink such as W&B continues its record.
            emit: receives a StepEvent for each logged step. `emit` of a workload sends it to the driver.
            shown: metrics of each step that are displayed to the user, in this order. A name that ends with `/`
                selects all metrics with that prefix.
        """
        self.run_dir = Path(run_dir)
        self._announce = emit
        self._shown = tuple(shown)
        self._sinks: dict[str, Sink] = {}
        self._off: set[str] = set()
        """Names of files and sinks that have failed. They are not tried again."""
        self._run_ids: dict[str, str | None] = {}
        # Remembers the keys in environment variables. An error message that quotes one is then written without it.
        redact(os.environ)
        hidden = redact(config)
        environment: dict[str, Any] = {}
        self._guard("rollouts", lambda: _begin_rollouts(self.run_dir / "rollouts", resume_step))
        self._guard("config.yaml", lambda: write_whole(self.run_dir / "config.yaml", config_text(config)))
        # Before the sinks are opened, because they show the environment beside the metrics.
        if write_environment := find("run record", "environment"):
            self._guard("environment.json", lambda: environment.update(write_environment(self.run_dir)))
        self._open_sink("metrics.jsonl", lambda: JsonLines(self.run_dir / "metrics.jsonl", resume_step))
        for name, settings in (sinks or {}).items():
            run_id = (state or {}).get(f"{name}_id")
            self._open_provided(name, SinkContext(self.run_dir, hidden, environment, resume_step, run_id), settings)
        self._guard("summary.json", lambda: begin_summary(self.run_dir, recipe, seed, resume_step))

    def state_dict(self) -> dict[str, Any]:
        """Return the identifiers with which sinks continue their records after a resume, as {"wandb_id": "..."}."""
        return {name: run_id for name, run_id in self._run_ids.items() if run_id}

    def log(
        self,
        step: int,
        metrics: Mapping[str, Any],
        *,
        steps: int = 0,
        sample: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Record the metrics of one step.

        Args:
            step: number of the step.
            metrics: numbers, texts, tensors or arrays by name. Mappings and lists of these are allowed.
            steps: total number of steps of the run, or 0 if it is not known.
            sample: returns one response of the step, which is displayed to the user.
        """
        values: dict[str, Any] = {}
        # Converted once, because every sink and observer needs plain values, and reading a tensor may wait for a GPU.
        if self._guard("metrics", lambda: values.update(plain(metrics))):
            self._emit(lambda sink: sink.log(step, values))
            shown = tuple(n for p in self._shown for n in values if n == p or (p.endswith("/") and n.startswith(p)))
            response: dict[str, Any] = {}
            if sample is not None:
                self._guard("a response of each step", lambda: response.update(plain(sample())))
            event = StepEvent(step, steps, time.time(), values, shown, response or None)
            self._guard("what observers get of steps", lambda: self._announce(event))

    def samples(self, step: int, rows: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Send samples of a step to the sinks of plug-ins, which display them as a table.

        Args:
            step: number of the step.
            rows: returns one row per sample, with the columns prompt, response, reward and so on. The columns of the
                table in W&B are those of the first row of the run. Nothing is written to files, since `rollouts` writes
                all samples.
        """
        values: list[dict[str, Any]] = []
        if self._guard("samples", lambda: values.extend(plain(rows()))) and values:
            self._emit(lambda sink: sink.samples(step, values))

    def rollouts(self, step: int, batch: Batch, name: str = ROLLOUTS) -> None:
        """Write the sequences of a step to a parquet file, one row per sequence. Objects that parquet cannot hold, such
        as dates or arrays, are written as text.

        Args:
            step: number of the step.
            batch: sequences of the step.
            name: path in the run folder, with `{step}` as placeholder.
        """
        path = self.run_dir / name.format(step=step)

        def save() -> None:
            try:
                batch.save(path)
            except ValueError:
                # The file is written for people and is never loaded by a run, so the text of such a label is enough.
                texts = {name: [str(x) for x in column] for name, column in batch.objects.items()}
                batch.with_objects(**texts).save(path)

        self._guard("rollouts", save)

    def keep_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Save the tokenizer in the run folder, unless it is there. It decodes the token ids of the rollouts."""
        folder = self.run_dir / "tokenizer"
        if not folder.exists():
            self._guard("tokenizer", lambda: tokenizer.save_pretrained(folder))

    def update_summary(self, **fields: Any) -> None:
        """Set fields of summary.json. Keys of `seconds` and `score` that are not given keep their values."""
        check_fields(fields)
        self._guard("summary.json", lambda: merge_summary(self.run_dir, fields))

    def close(self) -> None:
        """Flush and close the sinks. The driver sets the status in the summary; see `finish_summary`."""
        for name, sink in self._sinks.items():
            self._guard(name, sink.close)
        self._sinks.clear()

    def _open_provided(self, name: str, context: SinkContext, settings: Mapping[str, Any]) -> None:
        sink_type: SinkType = load(SINK, name)
        # Kept if the sink fails to open: a later attempt continues in the same record.
        self._run_ids[f"{name}_id"] = context.run_id

        def open_sink() -> Sink:
            sink = sink_type.open(context, **settings)
            self._run_ids[f"{name}_id"] = sink.run_id
            return sink

        self._open_sink(sink_type.TITLE, open_sink)

    def _open_sink(self, name: str, make: Callable[[], Sink]) -> None:
        self._guard(name, lambda: self._sinks.update({name: make()}))

    def _emit(self, act: Callable[[Sink], object]) -> None:
        for name, sink in list(self._sinks.items()):
            if not self._guard(name, lambda sink=sink: act(sink)):
                del self._sinks[name]

    def _guard(self, name: str, act: Callable[[], object]) -> bool:
        """Call `act`, and log a warning if it fails. Return True on success.

        Args:
            name: name of the file or sink. After a failure it is switched off: later calls with it return False.
            act: writes a part of the record, which the training does not depend on.
        """
        if name in self._off:
            return False
        try:
            act()
        # Any error, such as a full disk, a lost network or a bug in a sink: hours of training must not be lost for it.
        except Exception as error:  # noqa: BLE001
            self._off.add(name)
            what = f"{type(error).__name__}: {hide_in_text(str(error))}"
            logger.warning("%s of %s is switched off: %s", name, self.run_dir, what)
            return False
        return True


def console_line(step: int, metrics: Mapping[str, Any]) -> str:
    """Return the metrics of one step as `step=12 reward=0.512 ...`, with four significant digits."""
    return " ".join([f"step={step}", *(f"{name}={console_number(value)}" for name, value in metrics.items())])


def console_number(value: Any) -> str:
    """Return the value of a metric as text, with four significant digits."""
    number = plain(value)
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def config_text(config: Any) -> str:
    """Return a configuration as YAML, with keys and tokens redacted."""
    return yaml.safe_dump(redact(config), sort_keys=False, allow_unicode=True)


def _begin_rollouts(folder: Path, resume_step: int) -> None:
    """Create the folder of the rollouts, and remove the files of steps that will be repeated."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        # Without the removal, files of a longer earlier attempt would look like steps of this one.
        match = re.fullmatch(r"step_(\d+)\.parquet", path.name)
        if path.name.endswith(".partial") or (match and int(match[1]) > resume_step):
            path.unlink()
