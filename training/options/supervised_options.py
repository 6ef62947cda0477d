"""Options shared by recipes that train one model on a fixed data set. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from components.data.mixture import Note, mixer, source_names
from components.data.sources import check_sources, is_drawn
from components.models.attention import choose_attention
from components.ranges import Count, CountFromZero
from components.registry import load, require
from components.train.config import TrainConfig
from training.options.checkpoint_options import CheckpointOptions
from training.options.log_options import LogOptions
from training.options.model_options import ModelOptions
from training.options.parallel_options import ParallelOptions
from training.options.run_options import RunOptions, Seed, Steps
from training.options.schema import Options, active_when, at_home, errors_of, idle_options, of_plugin, without_effect
from training.options.train_options import LearnerOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


C = TypeVar("C", bound="SupervisedOptions")
T = TypeVar("T")
Rows = list[dict[str, Any]]


class Source(NamedTuple):
    """One source of the data."""

    option: str
    """Option that contains the source."""
    name: str
    split: str


@dataclass(kw_only=True)
class ExampleOptions(Options, group="data"):
    """The examples to train on. A recipe adds the columns that it reads."""

    path: str = ""
    """Training data: a json, jsonl, csv, parquet or arrow file, a folder of `save_to_disk` or of such files, a hub
    name, or `task:<name>` for a generated task. Separate several sources with commas."""
    probs: str | None = None
    """Mixture probabilities, one per source, such as `0.7,0.3`. By default the sources are concatenated."""
    split: str = "train"
    """Split of a hub name or folder. A file only has `train`."""
    apply_chat_template: bool = False
    """Format prompt and response as a user and an assistant message. Chat messages always use the chat template."""
    input_template: str | None = active_when(None, apply_chat_template=False)
    """Text around each prompt, with `{}` as placeholder of the prompt. By default the prompt is used as it is."""
    ignored_columns: str | None = None
    """Comma-separated columns to hide from the model although their names have a conventional meaning, such as `tools`,
    `system` or `context`. By default such columns are used, or their rows rejected."""
    max_samples: Count | None = None
    """Maximum number of examples, taken from the start. Default: all examples, or 10,000 of a generated task, which is
    unlimited."""
    max_tokens: Count = 2048
    """Maximum number of tokens of an example. Longer examples are excluded and counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = at_home(self.path)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if self.input_template is not None and "{}" not in self.input_template:
            yield f"data.input_template={self.input_template!r} has no placeholder {{}} for the prompt; add it"
        if self.path:
            yield from errors_of("data.", mixer, self.probs, len(source_names(self.path)))
            yield from errors_of(f"data.path={self.path}: ", check_sources, self.path)


@dataclass(frozen=True, kw_only=True)
class SupervisedTrainOptions(LearnerOptions):
    """Engine, batches, optimizer, schedule and memory of training."""

    zero_stage: int = 2
    precision: str = "auto"
    learning_rate: float = 5e-6
    lr_scheduler: str = "cosine_with_min_lr"
    lr_warmup_ratio: float = 0.03
    min_lr_ratio: float = 0.1
    batch_size: Count = 128
    """Number of examples per optimizer step, over all ranks."""
    micro_batch_size: Count | None = None
    """Maximum number of examples per rank in one forward and backward pass. By default only max_tokens limits it.
    Affects memory and speed, not results."""
    epochs: Count = 1
    """Number of passes over the examples, each in a different order."""


@dataclass(kw_only=True)
class HeldOutOptions(Options, group="evaluation"):
    """Evaluation on held-out examples."""

    path: str | None = None
    """Evaluation data, in the same forms as data.path. Default: `held_out` examples of the training data."""
    split: str = active_when("train", path=True)
    """Split of the evaluation data."""
    max_samples: Count | None = active_when(None, path=True)
    """Maximum number of evaluation examples. Default: all examples."""
    held_out: CountFromZero = active_when(0, path=False)
    """Without a path: number of training examples that are held out for evaluation. 0 holds out none."""
    every: Steps = -1
    """Interval between evaluations, in steps. -1 evaluates only at the start and at the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = self.path and at_home(self.path)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        # A generated task reserves no examples for evaluation here, so the score would be that of the training data.
        if any(is_drawn(source.strip()) for source in (self.path or "").split(",")):
            yield f"evaluation.path={self.path}: a task would repeat its training examples; set evaluation.held_out"


@dataclass(kw_only=True)
class RanksOptions(Options, group="placement"):
    """Nodes and ranks. Without a GPU every rank is a process on the CPU."""

    nodes: Count = 1
    """Number of machines."""
    interface: str = of_plugin("environment", "")
    """Network interface of every machine for collectives, rendezvous and weights, such as eth1. Default: the interface
    with the address by which Ray reaches the machine."""
    handshake_timeout: CountFromZero | None = of_plugin("handshake", None)
    """Time limit in seconds of each check of a channel between processes, before models are loaded. 0 skips the checks.
    Default: 20 with several machines or GPUs, else 0."""
    ranks_per_node: Count | None = None
    """Number of training processes on each machine. Default: one per GPU, or 1 without GPUs."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        if self.interface:
            yield from errors_of("", require, "job environment", "workers", f"placement.interface={self.interface}")
        if self.handshake_timeout is not None:
            yield from errors_of("", require, "handshake", "channels", "placement.handshake_timeout")

    @property
    def ranks(self) -> int:
        """Number of training processes on all machines. A number that is not resolved yet counts as one per machine."""
        ranks_per_node = self.ranks_per_node or 1
        return self.nodes * ranks_per_node


@dataclass(kw_only=True)
class SupervisedOptions(RunOptions):
    """Groups of options of a recipe that trains one model on a fixed data set."""

    EXAMPLES: ClassVar[str] = "examples"
    """Noun for examples in messages of the recipe."""
    GROUP_SIZE: ClassVar[int] = 1
    """Number of sequences of one example, which stay in the same micro-batch."""

    seed: Seed = 42
    """Random seed of the held-out selection, of the order of the examples, and of newly initialised weights."""
    max_steps: Count | None = None
    """Maximum number of optimizer steps. By default the number of examples and train.epochs determine it."""
    model: Any = field(default_factory=ModelOptions)
    """ModelOptions, or a recipe's own subclass."""
    data: Any = field(default_factory=ExampleOptions)
    """A recipe's own subclass of ExampleOptions."""
    train: SupervisedTrainOptions = field(default_factory=SupervisedTrainOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    evaluation: HeldOutOptions = field(default_factory=HeldOutOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    log: LogOptions = field(default_factory=LogOptions)
    placement: RanksOptions = field(default_factory=RanksOptions)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        for name, value in (("model.path", self.model.path), ("data.path", self.data.path)):
            if not value:
                yield f"{name} is empty; set {name}=..., or run without options for the demonstration"
        yield from self.parallel.combination_faults(self.train)
        if self.checkpoint.export != "last":
            yield from load("export check", self.checkpoint.export, "checkpoint.export")(self)
        if self.train.batch_size < self.placement.ranks:
            yield (
                f"train.batch_size={self.train.batch_size} is too small for {self.placement.ranks} ranks; raise it, "
                f"because each rank needs {self.noun} of every optimizer step"
            )

    @property
    def noun(self) -> str:
        """Noun for examples in messages of this run."""
        return self.EXAMPLES

    def examples_in(self, rows: Rows) -> int:
        """Return the number of examples in rows of the data."""
        return len(rows)

    def steps(self, examples: int) -> int:
        """Return the number of optimizer steps for a number of examples."""
        steps = self.train.epochs * -(-examples // self.train.batch_size)
        return min(steps, self.max_steps or steps)

    def resolved(self: C, gpus: int) -> C:
        """Return the options with all automatic values resolved.

        Args:
            gpus: number of GPUs of each machine.
        """
        model = replace(self.model, attn_implementation=choose_attention(self.model.attn_implementation, gpus))
        placement = replace(self.placement, ranks_per_node=self.placement.ranks_per_node or max(gpus, 1))
        return replace(self, model=model, train=self.train.resolved(gpus), placement=placement)

    def notes(self, set_options: Collection[str]) -> list[str]:
        """Return notes for the user before the run starts.

        Args:
            set_options: names of the options that the user has set.
        """
        evaluation = self.evaluation
        idle = [
            (
                evaluation.every > 0 and not evaluation.path and not evaluation.held_out,
                "evaluation.every",
                "there is no evaluation data; set evaluation.held_out or evaluation.path",
            ),
            *((True, name, why) for name, why in idle_options(self)),
        ]
        return without_effect(idle, set_options)

    @property
    def models(self) -> dict[str, str]:
        """Models that must exist, by option."""
        return {"model.path": self.model.path}

    @property
    def sources(self) -> list[Source]:
        """Sources of the training and evaluation data."""
        sources = [Source("data.path", name, self.data.split) for name in source_names(self.data.path)]
        if self.evaluation.path:
            names = source_names(self.evaluation.path)
            sources += [Source("evaluation.path", name, self.evaluation.split) for name in names]
        return sources

    def load(
        self, source: str, split: str, max_rows: int | None, note: Note | None = None, info: Note | None = None
    ) -> Rows:
        """Read the rows of one source.

        Args:
            source: file, folder, hub name or generated task.
            split: split of the source.
            max_rows: maximum number of rows, or None for all rows.
            note: called with the number of rows that max_rows excludes.
            info: called with the columns that are used.

        Raises:
            ValueError: the source cannot be read, or has other content.
        """
        raise NotImplementedError(f"{type(self).__name__} reads no data; define load(source, split, max_rows, note)")

    def check_examples(self, rows: Rows, source: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that the rows of a source can be encoded with tokens of the model.

        Raises:
            ValueError: a row cannot be encoded. The message names the row.
        """
        raise NotImplementedError(f"{type(self).__name__} encodes no data; define check_examples(rows, source, ...)")

    def describe_first(self, rows: Rows, source: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Describe the first example of a source and the tokens that are trained on."""
        raise NotImplementedError(f"{type(self).__name__} reads no data; define describe_first")

    def training_examples(
        self, read: Callable[[Rows, str], list[T]], info: Callable[[str], None] = lambda _: None
    ) -> list[T]:
        """Read all training examples.

        Args:
            read: function (rows, source) -> examples.
            info: called with the columns that are used.
        """
        return self._examples(self.data.path, self.data.split, self.data.probs, self.data.max_samples, read, info)

    def evaluation_examples(
        self, read: Callable[[Rows, str], list[T]], info: Callable[[str], None] = lambda _: None
    ) -> list[T]:
        """Read all examples of `evaluation.path`; see `training_examples`."""
        evaluation = self.evaluation
        return self._examples(evaluation.path or "", evaluation.split, None, evaluation.max_samples, read, info)

    def _examples(
        self,
        path: str,
        split: str,
        probs: str | None,
        max_rows: int | None,
        read: Callable[[Rows, str], list[T]],
        info: Callable[[str], None],
    ) -> list[T]:
        names = source_names(path)
        mixed = mixer(probs, len(names))
        parts = [read(self.load(name, split, max_rows, info=info), name) for name in names]
        return mixed(parts, self.seed)[:max_rows]

    def tokenizer(self, path: str) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the model at `path`.

        It pads with its end token if it has no padding token.
        """
        return self.model.tokenizer(path)

    def engine(self, total_steps: int) -> TrainConfig:
        """Return the configuration of the training engine.

        Args:
            total_steps: number of optimizer steps of the run.
        """
        micro_batch_size = self.train.micro_batch_size or 0
        config = self.train.for_run(total_steps, self.seed)
        return replace(self.parallel.of(config), max_sequences=self.GROUP_SIZE * micro_batch_size)
