"""The command line of a recipe that trains one model on data that is there, and the job that it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from components.data.records import read_records
from components.data.tasks import get_task
from components.engines.choice import choose_attention
from components.engines.memory import micro_batch_tokens, model_size, training
from core import Job, JobBuilder, Role
from core.placement import detect_devices
from training.command import Command
from training.inputs import check_model
from training.launch import STOP_GRACE_S
from training.plan import Plan, attention_notes, steps_text
from training.supervised_options import PairOptions, SupervisedOptions
from training.warm_start import WARM_START_PREFIX, resolve_model

C = TypeVar("C", bound=SupervisedOptions)
P = TypeVar("P", bound=PairOptions)


def supervised_job(config: SupervisedOptions, *, trainer: str, model: str, role: str = Role.ACTOR) -> JobBuilder:
    """What runs where; further roles may be added before `build()`.

    Args:
        config: the options.
        trainer: its class, as `package.module:Class`.
        model: the class of the ranks that train the model.
        role: of these.
    """
    builder = JobBuilder().config(config)
    builder.recovery(config.max_restarts, config.stall_timeout, STOP_GRACE_S, config.placement_timeout)
    builder.role(Role.TRAINER).run(trainer)
    builder.role(role).train(model).resource(accelerator=1)
    builder.node_num(config.num_nodes).nnodes(config.num_nodes).nproc_per_node(config.num_gpus_per_node or 1)
    return builder


class SupervisedCommand(Command[C]):
    """See `Command`."""

    models = frozenset({"pretrain", "config"})

    def __init__(self, schema: type[C], folder: Path, build_job: Callable[[C], Job], role: str = Role.ACTOR) -> None:
        """
        Args:
            schema: the options.
            folder: of the recipe.
            build_job: what runs where.
            role: that trains.
        """
        super().__init__(schema, folder)
        self.build_job = build_job
        self.role = role

    def plan(self, asked: C, arguments: list[str]) -> Plan:
        """See `Command.plan`."""
        notes = attention_notes(asked.attn_implementation)
        asked = replace(asked, attn_implementation=choose_attention(asked.attn_implementation, detect_devices()))
        job = self.build_job(asked)
        ranks, gpu, size = job.placement.processes[self.role], job.device_type == "GPU", model_size(asked.pretrain)
        engine = asked.engine(1, gpu)
        longest = min(asked.max_len, (size and size.positions) or asked.max_len)
        tokens = micro_batch_tokens(engine, longest, -(-asked.GROUP_SIZE * asked.train_batch_size // ranks))
        return Plan(
            recipe=self.folder.name,
            job=job,
            config=asked,
            changed=self.changed(arguments),
            # The role REWARD has a head of its own.
            needs={self.role: training(size, engine, ranks, tokens=tokens, gpu=gpu, has_head=self.role != Role.REWARD)},
            steps=steps_text(lambda count: arithmetic(asked, count, ranks), asked.dataset, asked.max_samples),
            choices=[f"{engine.engine} zero_stage={engine.stage} {engine.precision}"],
            notes=notes,
        )

    def check(self, plan: Plan) -> None:
        """See that models and data can be there."""
        config = plan.config
        for option, path in config.models.items():
            check_model(path, option)
        self.check_data(config)

    def check_data(self, config: C) -> None:
        """See that the dataset can be there; its rows are looked at when they are read.

        Raises:
            ValueError: it cannot.
        """
        kind, _, task = config.dataset.partition(":")
        with naming("dataset", config.dataset):
            if kind == "task":
                get_task(task)
            else:
                read_records(config.dataset)

    def checkpoints(self, config: C) -> str | None:
        """See `Command.checkpoints`."""
        return config.ckpt_path

    def ready(self, config: C) -> C:
        """With the paths of demonstration models, which are made where they are not there yet."""
        return replace(config, **{option: resolve_model(path) for option, path in config.models.items()})


class PairCommand(SupervisedCommand[P]):
    """Of a recipe that learns from pairs."""

    def check_data(self, config: P) -> None:
        """See that the first rows hold pairs, as the tokenizer reads them, and that all models read the same tokens."""
        kind, _, task = config.dataset.partition(":")
        if kind == "task":
            with naming("dataset", config.dataset):
                get_task(task).pairs(1, config.seed)
            if set(config.models.values()) <= {f"{WARM_START_PREFIX}{task}"} and not config.eval_dataset:
                return  # the model is made for these very pairs, and a tokenizer takes seconds to import
        from components.data.preferences import first_rows, read_pairs
        from components.data.text import same_vocabulary

        rows = first_rows(config.sources)  # before a model is made that is to read them
        config = self.ready(config)
        with naming("pretrain", config.pretrain):
            tokenizer = config.tokenizer(config.pretrain)
        for option, path in config.models.items():
            with naming(option, path):
                if path != config.pretrain and not same_vocabulary(tokenizer, config.tokenizer(path)):
                    raise ValueError(
                        f"it has another vocabulary than pretrain={config.pretrain}; set a model of the same family"
                    )
        for option, (source, _) in config.sources.items():
            with naming(option, source):
                read_pairs(rows[option], config.pair_format(source), tokenizer)


def arithmetic(config: SupervisedOptions, count: int, ranks: int) -> str:
    """The optimizer steps of so many examples, in a sentence."""
    rows = config.EXAMPLES
    held = 0 if isinstance(config, PairOptions) and config.eval_dataset else config.eval_samples
    if count <= held:
        return f"none: eval_samples={held} holds out all {count} {rows}"
    steps = config.max_epochs * -(-(count - held) // config.train_batch_size)
    return (
        f"{steps} optimizer steps of {config.train_batch_size} {rows}: {count - held} {rows} x {config.max_epochs} "
        f"epochs, {held} held out; in micro-batches of at most {config.max_tokens_per_gpu} tokens on each of "
        f"{ranks} processes"
    )


@contextmanager
def naming(option: str, value: str) -> Iterator[None]:
    """Let errors begin with the option that they are about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}={value}: {error}") from error
