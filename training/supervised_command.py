"""The command line of a recipe that trains one model on data that is there, and the job that it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from components.data.scorers import TASK_PREFIX
from components.engines.memory import learning
from components.engines.model_size import model_size
from core import JobBuilder, Role
from core.placement import detect_devices
from training.command import Command
from training.config import CommandLine
from training.inputs import check_model, check_vocabulary
from training.launch import STOP_GRACE_S
from training.plan import Plan, attention_notes, steps_text
from training.supervised_options import PairOptions, Rows, Source, SupervisedOptions
from training.warm_start import WARM_START_PREFIX, resolve_model

C = TypeVar("C", bound=SupervisedOptions)
P = TypeVar("P", bound=PairOptions)

FIRST_ROWS = 100
"""So many of each part of the data are looked at before anything starts."""


def supervised_job(config: SupervisedOptions, *, trainer: str, model: str, role: str = Role.ACTOR) -> JobBuilder:
    """What runs where; further roles may be added before `build()`.

    Args:
        config: the options, with everything filled in.
        trainer: its class, as `package.module:Class`.
        model: the class of the ranks that train the model.
        role: of these.
    """
    builder = JobBuilder().config(config)
    builder.recovery(config.max_restarts, config.stall_timeout, STOP_GRACE_S, config.placement_timeout)
    builder.role(Role.TRAINER).run(trainer)
    builder.role(role).train(model).resource(accelerator=1)
    nodes = config.placement.nodes
    builder.node_num(nodes).nnodes(nodes).nproc_per_node(config.placement.ranks_per_node or 1)
    return builder


class SupervisedCommand(Command[C]):
    """See `Command`."""

    def plan(self, asked: C, line: CommandLine[C]) -> Plan:
        """See `Command.plan`."""
        gpus = detect_devices()
        config = asked.resolved(gpus)
        job = self.build_job(config)
        ranks, gpu, size = config.placement.ranks, job.device_type == "GPU", model_size(config.model.path)
        engine = config.engine(1)
        longest = min(config.data.max_tokens, (size and size.positions) or config.data.max_tokens)
        sequences = config.GROUP_SIZE * config.train.batch_size
        role = next(name for name, own in job.roles.items() if own.kind == "train")
        # A reward model has a head of its own.
        has_head = role != Role.REWARD
        need = learning(size, engine, ranks, longest, sequences, gpu=gpu, has_head=has_head)
        data = config.data
        return Plan(
            recipe=self.folder.name,
            job=job,
            config=config,
            changed=line.changed(),
            needs={role: need},
            steps=steps_text(lambda count: arithmetic(config, count), data.path, data.max_samples, data.probs),
            choices=[f"{engine.engine} zero_stage={engine.stage} {engine.precision}"],
            notes=config.notes(line.named) + attention_notes(asked.model.attn_implementation),
        )

    def check(self, plan: Plan) -> None:
        """See that models and data can be there."""
        for option, path in plan.config.models.items():
            check_model(path, option)
        self.check_data(plan.config)

    def check_data(self, config: C) -> None:
        """See that the first rows of each part of the data hold examples, and that the model knows its tokens.

        Raises:
            ValueError: they do not, or it does not.
        """
        rows = [(source, self.first_rows(config, source)) for source in config.sources]
        for option, path in config.models.items():
            if path.startswith(WARM_START_PREFIX):
                continue
            with naming(option, path):
                tokenizer = config.tokenizer(path)
                check_vocabulary(tokenizer, config.model)
            for source, part in rows:
                with naming(source.option, source.name):
                    config.check_rows(part, source.name, tokenizer)

    def first_example(self, config: C) -> list[str]:
        """See `Command.first_example`."""
        lines: list[str] = []
        source = config.sources[0]
        with naming(source.option, source.name):
            rows = config.load(source.name, source.split, FIRST_ROWS, lines.append)
            return lines + config.describe_first(rows, source.name, config.tokenizer(config.model.path))

    def first_rows(self, config: C, source: Source) -> Rows:
        """A few rows of a part of the data, for a look at them before anything starts.

        Raises:
            ValueError: it cannot be read; the message begins with its option.
        """
        with naming(source.option, source.name):
            return config.load(source.name, source.split, FIRST_ROWS, lambda _: None)

    def ready(self, config: C) -> C:
        """With the paths of demonstration models, which are made where they are not there yet."""
        config = self.with_models(config)
        if "model.path" not in config.models:
            if config.model.config_overrides or config.model.tokenizer_path:
                raise ValueError(
                    f"model.path={config.model.path} is made here, with a tokenizer and settings of its own; leave "
                    "model.config_overrides and model.tokenizer_path out, or set model.path to a folder"
                )
            return config
        return replace(config, model=config.model.prepared(Path(config.run_dir)))

    def with_models(self, config: C) -> C:
        """The same, without a folder of the run."""
        for option, path in config.models.items():
            group, _, name = option.partition(".")
            config = replace(config, **{group: replace(getattr(config, group), **{name: resolve_model(path)})})
        return config


class PairCommand(SupervisedCommand[P]):
    """Of a recipe that learns from pairs."""

    def check_data(self, config: P) -> None:
        """See that the first rows hold pairs, as the tokenizer reads them, and that all models read the same tokens."""
        # Before a model is made that is to read them.
        rows = [(source, self.first_rows(config, source)) for source in config.sources]
        made_for = {f"{TASK_PREFIX}{path.removeprefix(WARM_START_PREFIX)}" for path in config.models.values()}
        if made_for == {source.name for source, _ in rows}:
            return  # the model is made for these very pairs, and a tokenizer takes seconds to import
        from components.data.preferences import read_pairs
        from components.data.text import same_vocabulary

        config = self.with_models(config)
        first = config.model.path
        with naming("model.path", first):
            tokenizer = config.tokenizer(first)
            if "model.path" in config.models:  # it is not made here, for this very tokenizer
                check_vocabulary(tokenizer, config.model)
        for option, path in config.models.items():
            with naming(option, path):
                if path != first and not same_vocabulary(tokenizer, config.tokenizer(path)):
                    raise ValueError(
                        f"it has another vocabulary than model.path={first}; set a model of the same family"
                    )
        for source, own in rows:
            with naming(source.option, source.name):
                read_pairs(own, config.pair_format(source.name), tokenizer)


def arithmetic(config: SupervisedOptions, count: int) -> str:
    """The optimizer steps of so many examples, in a sentence."""
    rows, train, evaluation = config.EXAMPLES, config.train, config.evaluation
    held = 0 if evaluation.path else evaluation.held_out
    if count <= held:
        return f"none: evaluation.held_out={held} holds out all {count} {rows}"
    steps = train.epochs * -(-(count - held) // train.batch_size)
    return (
        f"{steps} optimizer steps of {train.batch_size} {rows}: {count - held} {rows} x {train.epochs} epochs, {held} "
        f"held out; in micro-batches of at most {train.max_tokens} tokens on each of {config.placement.ranks} processes"
    )


@contextmanager
def naming(option: str, value: str) -> Iterator[None]:
    """Let errors begin with the option that they are about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}={value}: {error}") from error
