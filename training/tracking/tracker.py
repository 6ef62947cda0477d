"""The recorder of one run."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from components.registry import load
from training.tracking.environment import write_environment
from training.tracking.event_types import StepEvent
from training.tracking.redaction import hide_in_text, redact
from training.tracking.serialization import plain, write_whole
from training.tracking.sinks import SINK, JsonLines, Sink, SinkContext, SinkType
from training.tracking.summary import begin_summary, check_fields, merge_summary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.batch import Batch

logger = logging.getLogger(__name__)

ROLLOUTS, UNREWARDED = "rollouts/step_{step:06d}.parquet", "failed/step_{step:06d}-rewards.parquet"
"""Files of a step: its training samples, and the samples that are excluded because they have no reward."""


class Tracker:
    """Records one run. Lives in the trainer's process, and is the only writer of the files while it runs."""

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
        """Open the run's files; write its config and environment.

        Args:
            run_dir: the run's folder; made if missing.
            recipe: the name of the recipe, for the summary.
            config: a mapping or dataclass; written with keys and tokens hidden.
            seed: the run's seed, for the summary.
            sinks: settings of further metric sinks by the names under which plug-ins provide them, such as
                `{"tensorboard": {}}`. Default: metrics.jsonl alone.
            resume_step: metrics and rollouts of later steps are removed, as those steps are done again; 0 begins anew.
            state: `state_dict()` of the tracker in the checkpoint. A sink such as W&B continues in the same record.
            emit: takes a StepEvent for every line of metrics; a workload's `emit` brings it to the driver.
            shown: the metrics that a person is to see of each step, in this order; a name that ends in `/` stands for
                all of that group.
        """
        self.run_dir = Path(run_dir)
        self._announce, self._shown = emit, tuple(shown)
        self._sinks: dict[str, Sink] = {}
        self._off: set[str] = set()
        self._run_ids: dict[str, str | None] = {}
        redact(os.environ)  # so that no key that stands there is written
        hidden = redact(config)
        environment: dict[str, Any] = {}
        self._guard("rollouts", lambda: _begin_rollouts(self.run_dir / "rollouts", resume_step))
        self._guard("config.yaml", lambda: write_config(self.run_dir, config))
        self._guard("environment.json", lambda: environment.update(write_environment(self.run_dir)))
        self._open_sink("metrics.jsonl", lambda: JsonLines(self.run_dir / "metrics.jsonl", resume_step))
        for name, settings in (sinks or {}).items():
            run_id = (state or {}).get(f"{name}_id")
            self._open_provided(name, SinkContext(self.run_dir, hidden, environment, resume_step, run_id), settings)
        self._guard("summary.json", lambda: begin_summary(self.run_dir, recipe, seed, resume_step))

    def state_dict(self) -> dict[str, Any]:
        """Identifiers with which sinks continue after a resume, such as {"wandb_id": "..."}."""
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
            step: its number.
            metrics: numbers, text, or tensors and arrays; mappings and lists of them too.
            steps: how many the run is to have; 0: not known.
            sample: gives one response of the step, for who watches.
        """
        values: dict[str, Any] = {}
        if self._guard("metrics", lambda: values.update(plain(metrics))):
            self._emit(lambda sink: sink.log(step, values))
            shown = tuple(name for pattern in self._shown for name in values if _is(name, pattern))
            response: dict[str, Any] = {}
            if sample is not None:
                self._guard("a response of each step", lambda: response.update(plain(sample())))
            event = StepEvent(step, steps, time.time(), values, shown, response or None)
            self._guard("what observers get of steps", lambda: self._announce(event))

    def samples(self, step: int, rows: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Show prompts, responses, rewards, ... of one step, a row for each, on W&B and TensorBoard. `rows` gives them.

        The first row of the run names the columns of the table on W&B. Files get nothing: `rollouts` has it all.
        """
        values: list[dict[str, Any]] = []
        if self._guard("samples", lambda: values.extend(plain(rows()))) and values:
            self._emit(lambda sink: sink.samples(step, values))

    def rollouts(self, step: int, batch: Batch, name: str = ROLLOUTS) -> None:
        """Write the sequences of one step to `rollouts/step_<step>.parquet`, or under another name, a row for each;
        objects that no file can hold, such as dates or arrays, as text.
        """
        path = self.run_dir / name.format(step=step)

        def save() -> None:
            try:
                batch.save(path)
            except ValueError:
                # A label of the user's own kind would not come back as it is; people who look can read its text.
                texts = {name: [str(x) for x in column] for name, column in batch.objects.items()}
                batch.with_objects(**texts).save(path)

        self._guard("rollouts", save)

    def keep_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write `tokenizer/`, once: by it the token ids of the rollouts can be read."""
        folder = self.run_dir / "tokenizer"
        if not folder.exists():
            self._guard("tokenizer", lambda: tokenizer.save_pretrained(folder))

    def update_summary(self, **fields: Any) -> None:
        """Set fields of summary.json; of `seconds` and `score` only the parts that are given."""
        check_fields(fields)
        self._guard("summary.json", lambda: merge_summary(self.run_dir, fields))

    def close(self) -> None:
        """Flush the sinks. The summary's status is for `finish_summary`, which the driver calls."""
        for name, sink in self._sinks.items():
            self._guard(name, sink.close)
        self._sinks.clear()

    def _open_provided(self, name: str, context: SinkContext, settings: Mapping[str, Any]) -> None:
        sink_type: SinkType = load(SINK, name)
        # Kept if the sink fails to open: a later attempt continues in the same record.
        self._run_ids[f"{name}_id"] = context.run_id

        def open_it() -> Sink:
            sink = sink_type.open(context, **settings)
            self._run_ids[f"{name}_id"] = sink.run_id
            return sink

        self._open_sink(sink_type.TITLE, open_it)

    def _open_sink(self, name: str, make: Callable[[], Sink]) -> None:
        def open_it() -> None:
            self._sinks[name] = make()

        self._guard(name, open_it)

    def _emit(self, act: Callable[[Sink], object]) -> None:
        for name, sink in list(self._sinks.items()):
            if not self._guard(name, lambda sink=sink: act(sink)):
                del self._sinks[name]

    def _guard(self, name: str, act: Callable[[], object]) -> bool:
        """Do something that the run can live without; after its first failure it is not tried again."""
        if name in self._off:
            return False
        try:
            act()
        # A full disk, a network that is gone, a bug in a sink: the training continues whatever it is.
        except Exception as error:  # noqa: BLE001
            self._off.add(name)
            what = f"{type(error).__name__}: {hide_in_text(str(error))}"
            logger.warning("%s of %s is switched off: %s", name, self.run_dir, what)
            return False
        return True


def _is(name: str, pattern: str) -> bool:
    return name.startswith(pattern) if pattern.endswith("/") else name == pattern


def console_line(step: int, metrics: Mapping[str, Any]) -> str:
    """Write the metrics of one step as `step=12 reward=0.512 ...`, four digits to a number."""
    return " ".join([f"step={step}", *(f"{name}={console_number(value)}" for name, value in metrics.items())])


def console_number(value: Any) -> str:
    """A value of a metric as a person reads it: four digits to a number."""
    number = plain(value)
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def config_text(config: Any) -> str:
    """A configuration as YAML, with keys and tokens hidden."""
    return yaml.safe_dump(redact(config), sort_keys=False, allow_unicode=True)


def write_config(run_dir: Path, config: Any) -> None:
    """Write config.yaml."""
    write_whole(run_dir / "config.yaml", config_text(config))


def _begin_rollouts(folder: Path, resume_step: int) -> None:
    """Make the folder of the rollouts, without those of steps that are done again."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        match = re.fullmatch(r"step_(\d+)\.parquet", path.name)
        if path.name.endswith(".partial") or (match and int(match[1]) > resume_step):
            path.unlink()
