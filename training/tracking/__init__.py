"""Record of a run: metrics, rollouts, events and a summary in files, and metrics in further sinks of plug-ins.

An error here never ends a training run: a sink that fails is switched off with one warning. This package does not
import torch.

<run_dir>/config.yaml  environment.json  metrics.jsonl  events.jsonl  summary.json  rollouts/step_000012.parquet
          tokenizer/  tensorboard/  wandb/  .lock
"""

from training.tracking.event_types import AlarmEvent, PhaseEvent, StepEvent
from training.tracking.events import EventLog
from training.tracking.redaction import redact
from training.tracking.run_folder import open_run_folder
from training.tracking.summary import finish_summary
from training.tracking.tracker import Tracker, config_text, console_line

__all__ = [
    "AlarmEvent",
    "EventLog",
    "PhaseEvent",
    "StepEvent",
    "Tracker",
    "config_text",
    "console_line",
    "finish_summary",
    "open_run_folder",
    "redact",
]
