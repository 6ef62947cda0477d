"""The options of this recipe, beside those that supervised recipes share; `--help` prints them all.

`--flag value` and `flag=value` mean the same; `--config FILE` reads YAML.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from components.data.tasks import get_task
from training.options import new_run_dir
from training.supervised_options import SupervisedOptions

RECIPE = Path(__file__).parent.name
NEW = "new:"
"""How `pretrain` begins where it names a task, for which the trainer makes a model."""


@dataclass(kw_only=True)
class SFTConfig(SupervisedOptions):
    """Learn to respond as the demonstrations do."""

    EXAMPLES: ClassVar[str] = "demonstrations"

    run_dir: str = field(default_factory=lambda: new_run_dir(RECIPE))
    """Folder of everything that the run writes."""
    pretrain: str = ""
    """The model to start from: a folder or hub name, `warm_start:<task>` for a task's demonstration model, or
    `new:<task>` for an untrained tiny one."""
    dataset: str = ""
    """Demonstrations: a json, jsonl or parquet file of rows with `prompt` and `response`, or with `messages`; or
    `task:<name>` for a generated task's."""
    max_samples: int | None = 100_000
    """Use at most this many demonstrations."""
    eval_samples: int = 0
    """Hold out so many demonstrations, the last ones, and report the loss on them."""
    save_steps: int = 100
    """A checkpoint every so many optimizer steps; -1 only when the training ends or is stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pretrain.startswith(NEW):
            get_task(self.pretrain.removeprefix(NEW))

    @property
    def models(self) -> dict[str, str]:
        """See `SupervisedOptions.models`."""
        return {} if self.pretrain.startswith(NEW) else super().models
