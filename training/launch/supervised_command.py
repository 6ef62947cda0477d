"""The command line of a recipe that trains one model on a fixed dataset, and its job."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from components.data.sources import DEFAULT_ROWS, is_drawn
from components.models.size import model_size
from components.models.sources import is_made, resolve_model
from core import JobBuilder, Role
from core.placement import detect_devices
from training.launch.command import Command
from training.launch.launch import STOP_GRACE_S
from training.launch.model_checks import check_model, check_vocabulary
from training.launch.model_use import ModelUse
from training.launch.plan import Plan, attention_notes
from training.launch.row_counts import steps_text
from training.options.config import CommandLine
from training.options.model_options import ModelOptions
from training.options.schema import ConfigError, limit_note
from training.options.supervised_options import Rows, Source, SupervisedOptions

if TYPE_CHECKING:
    from training.run.supervised_run import TrainingData

C = TypeVar("C", bound=SupervisedOptions)

FIRST_ROWS = 100
"""Number of rows of a generated task that are drawn before anything starts."""
ENCODED_ROWS = 1_000
"""Maximum number of rows of each source that are tokenized before anything starts."""


def supervised_job(config: SupervisedOptions, *, trainer: str, model: str, role: str = Role.ACTOR) -> JobBuilder:
    """Return the builder of a job that trains one model. Further roles may be added before `build()`.

    Args:
        config: resolved options.
        trainer: class of the trainer, as `package.module:Class`.
        model: class of the ranks that train the model.
        role: role of these ranks.
    """
    builder = JobBuilder().config(config)
    builder.recovery(config.max_restarts, config.stall_timeout, STOP_GRACE_S, config.placement_timeout)
    builder.role(Role.TRAINER).run(trainer)
    builder.role(role).train(model).resource(accelerator=1)
    nodes = config.placement.nodes
    builder.node_num(nodes).nnodes(nodes).nproc_per_node(config.placement.ranks_per_node or 1)
    return builder


class SupervisedCommand(Command[C]):
    """The command of a recipe that trains one model on a fixed dataset."""

    DATA = "examples"

    def plan(self, requested: C, line: CommandLine[C]) -> Plan:
        """See `Command.plan`."""
        config = requested.resolved(detect_devices())
        job = self.build_job(config)
        size = model_size(config.model.path)
        engine = config.engine(1)
        role = next(name for name, job_role in job.roles.items() if job_role.kind == "train")
        use = ModelUse(
            role=role,
            path=config.model.path,
            config=engine,
            sequences=config.GROUP_SIZE * config.train.batch_size,
            # A reward model has a scalar head instead of an output layer over the vocabulary.
            has_head=role != Role.REWARD,
        )
        data = config.data
        return Plan(
            recipe=self.folder.name,
            job=job,
            config=config,
            changed=line.changed,
            models=[use],
            longest=min(data.max_tokens, (size and size.positions) or data.max_tokens),
            steps=steps_text(lambda count: arithmetic(config, count), data.path, data.max_samples, data.probs),
            choices=[f"{engine.engine} zero_stage={engine.stage} {engine.precision}"],
            notes=config.notes(line.named) + attention_notes(requested.model.attn_implementation),
        )

    def check(self, plan: Plan) -> None:
        """Check models and data."""
        for option, path in plan.config.models.items():
            if option not in plan.absent:
                check_model(path, option)
        notes: list[str] = []
        rows = self.rows(plan.config, notes)
        self.check_data(plan.config, rows, plan.absent)
        row_count, count = _example_counts(plan.config, rows)
        self.check_held_out(plan.config, count)
        # The plan has counted a row as one example, but a pair is two in KTO. A mixture repeats rows as well.
        if row_count != count and not plan.config.data.probs:
            plan.steps = arithmetic(plan.config, count)
        plan.notes = [*plan.notes, *notes]

    def models(self, config: C) -> dict[str, str]:
        """See `Command.models`."""
        return config.models

    def check_held_out(self, config: C, count: int) -> None:
        """Check that some of `count` examples remain to train on besides the held-out ones.

        Raises:
            ConfigError: all examples are held out.
        """
        held = config.evaluation.held_out
        if held and not config.evaluation.path and count <= held:
            raise ConfigError(
                f"evaluation.held_out={held} holds out all {count} {config.noun} of data.path={config.data.path}; "
                "lower it, or set evaluation.path to held-out data of its own"
            )

    def check_data(self, config: C, rows: list[tuple[Source, Rows]], absent: Collection[str] = ()) -> None:
        """Check that the model can read each part of the data.

        Args:
            config: options of the run.
            rows: rows of each part of the data.
            absent: options whose models are missing on this machine. They are not checked.

        Raises:
            ValueError: a tokenizer or an example does not fit the model.
        """
        for option, path in config.models.items():
            if option in absent or is_made(path):
                continue
            with naming(option, path):
                tokenizer = config.tokenizer(path)
                check_vocabulary(tokenizer, config.model)
            for source, part in rows:
                with naming(source.option, source.name):
                    config.check_examples(part[:ENCODED_ROWS], source.name, tokenizer)

    def first_example(self, config: C) -> list[str]:
        """See `Command.first_example`."""
        lines: list[str] = []
        source = config.sources[0]
        with naming(source.option, source.name):
            rows = config.load(source.name, source.split, FIRST_ROWS, info=lines.append)
            return lines + config.describe_first(rows, source.name, config.tokenizer(config.model.path))

    def rows(self, config: C, notes: list[str]) -> list[tuple[Source, Rows]]:
        """Read the rows of each part of the data, or a few of a generated task, before anything starts.

        Args:
            config: options of the run.
            notes: list that the number of rows left out by max_samples is appended to.

        Raises:
            ValueError: a part cannot be read. The message begins with its option.
        """
        parts: list[tuple[Source, Rows]] = []
        limits = {"data.path": config.data.max_samples, "evaluation.path": config.evaluation.max_samples}
        for source in config.sources:
            # Each row of a generated task takes time to draw, and the first ones are like all others.
            limit = FIRST_ROWS if is_drawn(source.name) else limits[source.option]
            with naming(source.option, source.name):
                note = limit_note(notes, source.option.replace("path", "max_samples"))
                parts.append((source, config.load(source.name, source.split, limit, note)))
        for option, limit in limits.items():
            count = sum(len(rows) for source, rows in parts if source.option == option)
            if limit is not None and sum(source.option == option for source, _ in parts) > 1 and count > limit:
                name = option.replace("path", "max_samples")
                notes.append(f"{name}={limit}: the sources together have {count} rows, of which only {limit} are used")
        return parts

    def exported(self, config: C) -> ModelOptions | None:
        """See `Command.exported`."""
        return config.model if "model.path" in config.models else None

    @abstractmethod
    def training_data(self, config: C, scratch: str) -> TrainingData:
        """Return the tokenized examples, as for the trainer.

        Args:
            config: resolved options.
            scratch: empty folder for a model that has to be created.
        """

    def ready(self, config: C) -> C:
        """See `Command.ready`. Models of the demonstration are created if they do not exist."""
        config = self.with_models(config)
        if "model.path" not in config.models:
            if config.model.config_overrides or config.model.tokenizer_path:
                raise ValueError(
                    f"model.path={config.model.path} is created by this run, with its own tokenizer and config.json; "
                    "remove model.config_overrides and model.tokenizer_path, or set model.path to a folder"
                )
            return config
        return replace(config, model=config.model.prepared(Path(config.run_dir)))

    def with_models(self, config: C) -> C:
        """Replace the names of demonstration models by their paths. Creates no folder in the run folder."""
        for option, path in config.models.items():
            group, _, name = option.partition(".")
            config = replace(config, **{group: replace(getattr(config, group), **{name: resolve_model(path)})})
        return config


def arithmetic(config: SupervisedOptions, count: int) -> str:
    """Describe the number of optimizer steps for `count` examples."""
    rows, train, evaluation = config.noun, config.train, config.evaluation
    held = 0 if evaluation.path else evaluation.held_out
    if count <= held:
        return f"none: evaluation.held_out={held} holds out all {count} {rows}"
    steps = config.steps(count - held)
    return (
        f"{steps} optimizer steps of {train.batch_size} {rows}: {count - held} {rows} x {train.epochs} epochs, {held} "
        f"held out; in micro-batches of at most {train.max_tokens} tokens on each of {config.placement.ranks} processes"
    )


def _example_counts(config: SupervisedOptions, rows: list[tuple[Source, Rows]]) -> tuple[int, int]:
    """Return the number of rows of the training data that are used, and the number of examples in them."""
    parts = [part for source, part in rows if source.option == "data.path"]
    total = count = sum(map(len, parts))
    most = config.data.max_samples
    # A generated task has as many rows as are requested, so its rows here are no limit.
    if any(is_drawn(source.name) for source, _ in rows):
        count = most or DEFAULT_ROWS
    count = min(count, most or count)
    return count, count * sum(map(config.examples_in, parts)) // max(total, 1)


@contextmanager
def naming(option: str, value: str) -> Iterator[None]:
    """Prefix ValueErrors of the block with the option that they are about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}={value}: {error}") from error
