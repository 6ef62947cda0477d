"""Options that recipes share which train one model on a fixed set of data.

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from components.data.mixture import Note, mixed, mixture_probabilities, source_names
from components.data.sources import check_sources, is_drawn
from components.models.attention import choose_attention
from components.ranges import Count, CountFromZero
from components.train.config import TrainConfig, choose_precision
from training.options.checkpoint_options import CheckpointOptions
from training.options.log_options import LogOptions
from training.options.model_options import ModelOptions
from training.options.parallel_options import ParallelOptions
from training.options.run_options import RunOptions, Seed, Steps
from training.options.schema import Options, active_when, at_home, errors_of, idle_options, without_effect
from training.options.train_options import LearnerOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


C = TypeVar("C", bound="SupervisedOptions")
T = TypeVar("T")
Rows = list[dict[str, Any]]


class Source(NamedTuple):
    """One part of the data."""

    option: str
    """That names it."""
    name: str
    split: str


@dataclass(kw_only=True)
class ExampleOptions(Options, group="data"):
    """The examples to train on; a recipe adds the columns that it reads."""

    path: str = ""
    """A json, jsonl, csv, parquet or arrow file, a folder of `save_to_disk` or with such files, a hub name, or
    `task:<name>` for a generated task; several with commas between."""
    probs: str | None = None
    """Shares of a mixture, one per source, as `0.7,0.3`. Default: all of one source, then all of the next."""
    split: str = "train"
    """Which split of a hub name or folder; a file has only train."""
    apply_chat_template: bool = False
    """Take prompt and response as a user's and an assistant's message. Chat messages always go through the template."""
    input_template: str | None = active_when(None, apply_chat_template=False)
    """Text around each prompt, with `{}` in its place."""
    ignored_columns: str | None = None
    """Columns, with commas between, that the model is not to read although their names have a well-known meaning, such
    as `tools`, `system` or `context`; without it they are used, or their rows refused."""
    max_samples: Count | None = None
    """Use at most this many examples, the first ones. Default: all; of a generated task, which has no end, 10,000."""
    max_tokens: Count = 2048
    """Longer examples are left out, and counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = at_home(self.path)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if self.input_template is not None and "{}" not in self.input_template:
            yield f"data.input_template={self.input_template!r} has no place for the prompt; write {{}} there"
        if self.path:
            yield from errors_of("data.", mixture_probabilities, self.probs, len(source_names(self.path)))
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
    """Examples of an optimizer step, over all ranks."""
    micro_batch_size: Count | None = None
    """Examples in a forward and backward pass of a rank, at most. Default: as many as max_tokens allows. Changes memory
    and speed, not results."""
    epochs: Count = 1
    """How often the examples are gone through, each time in another order."""


@dataclass(kw_only=True)
class HeldOutOptions(Options, group="evaluation"):
    """Evaluation on held-out examples."""

    path: str | None = None
    """Examples that are only evaluated on, as data.path. Default: `held_out` of the data's own."""
    split: str = active_when("train", path=True)
    """Which split of it."""
    max_samples: Count | None = active_when(None, path=True)
    """Use at most this many of it. Default: all."""
    held_out: CountFromZero = active_when(0, path=False)
    """Without a path: hold out so many examples of the data; 0: none."""
    every: Steps = -1
    """Evaluate every so many steps; -1 only at the start and at the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = self.path and at_home(self.path)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if any(is_drawn(source.strip()) for source in (self.path or "").split(",")):
            yield f"evaluation.path={self.path}: a task draws the examples of its data again; set evaluation.held_out"


@dataclass(kw_only=True)
class RanksOptions(Options, group="placement"):
    """Nodes and ranks. Without a GPU every rank is a process on the CPU."""

    nodes: Count = 1
    """Machines."""
    ranks_per_node: Count | None = None
    """Processes that train the model on each. Default: one per GPU, 1 without GPUs."""

    @property
    def ranks(self) -> int:
        """Processes that train the model, on all machines; of a number that is left to the machine at least one
        each.
        """
        return self.nodes * (self.ranks_per_node or 1)


@dataclass(kw_only=True)
class SupervisedOptions(RunOptions):
    """The groups of options of a recipe that trains one model on data that is there from the start."""

    EXAMPLES: ClassVar[str] = "examples"
    """What a recipe calls them in messages."""
    GROUP_SIZE: ClassVar[int] = 1
    """Sequences of an example, which stay together."""

    seed: Seed = 42
    """Fixes what is held out, the order of the rest, and the first weights of what is new."""
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
        yield from self.parallel.faults_beside(self.train)
        if self.train.batch_size < self.placement.ranks:
            yield (
                f"train.batch_size={self.train.batch_size} {self.EXAMPLES} for {self.placement.ranks} ranks; set as "
                "many or more"
            )

    def resolved(self: C, gpus: int) -> C:
        """With everything filled in that was left to the machine.

        Args:
            gpus: of each machine.
        """
        attention = choose_attention(self.model.attn_implementation, gpus)
        return replace(
            self,
            model=replace(self.model, attn_implementation=attention),
            train=replace(self.train, precision=choose_precision(self.train.precision, gpus)),
            placement=replace(self.placement, ranks_per_node=self.placement.ranks_per_node or max(gpus, 1)),
        )

    def notes(self, given: Collection[str]) -> list[str]:
        """What a user who has named the options `given` should know of before the run starts."""
        evaluation = self.evaluation
        idle = [
            (
                evaluation.every > 0 and not evaluation.path and not evaluation.held_out,
                "evaluation.every",
                "nothing is held out; evaluation.held_out does that",
            ),
            *((True, name, why) for name, why in idle_options(self)),
        ]
        return without_effect(idle, given)

    @property
    def models(self) -> dict[str, str]:
        """The models that have to be there, by option."""
        return {"model.path": self.model.path}

    @property
    def sources(self) -> list[Source]:
        """The parts of the data to train and to evaluate on."""
        found = [Source("data.path", name, self.data.split) for name in source_names(self.data.path)]
        if self.evaluation.path:
            names = source_names(self.evaluation.path)
            found += [Source("evaluation.path", name, self.evaluation.split) for name in names]
        return found

    def load(
        self, source: str, split: str, max_rows: int | None, note: Note | None = None, info: Note | None = None
    ) -> Rows:
        """Read rows of one part of the data, at most so many.

        `note` is called with how many are left out, `info` with the columns that are used.

        Raises:
            ValueError: it cannot be read, or holds something else.
        """
        raise NotImplementedError(f"{type(self).__name__} reads no data; define load(source, split, max_rows, note)")

    def check_examples(self, rows: Rows, source: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that rows of one part of the data can be encoded with tokens that the model has.

        Raises:
            ValueError: one cannot. It names the row.
        """
        raise NotImplementedError(f"{type(self).__name__} encodes no data; define check_examples(rows, source, ...)")

    def check_rows(self, rows: Rows, source: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that rows of a source can be tokenized; ValueError where one cannot."""

    def describe_first(self, rows: Rows, source: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Describe the first example of rows of a source, and what is learnt of it, as a run does."""
        raise NotImplementedError(f"{type(self).__name__} reads no data; define describe_first")

    def training_examples(
        self, read: Callable[[Rows, str], list[T]], info: Callable[[str], None] = lambda _: None
    ) -> list[T]:
        """Read all examples of the data.

        Args:
            read: (rows, the part of the data that they are of) -> examples.
            info: shows which columns are used.
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
        most: int | None,
        read: Callable[[Rows, str], list[T]],
        info: Callable[[str], None],
    ) -> list[T]:
        names = source_names(path)
        parts = [read(self.load(name, split, most, info=info), name) for name in names]
        return mixed(parts, mixture_probabilities(probs, len(names)), self.seed)[:most]

    def tokenizer(self, path: str) -> PreTrainedTokenizerBase:
        """Of the model at `path`; it pads with its end token where it has no other."""
        return self.model.tokenizer(path)

    def engine(self, total_steps: int) -> TrainConfig:
        """The training engine, in a run of so many optimizer steps."""
        limit = self.GROUP_SIZE * (self.train.micro_batch_size or 0)
        return replace(self.parallel.of(self.train.for_run(total_steps, self.seed)), max_sequences=limit)
