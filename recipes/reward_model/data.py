"""Where rows have their pairs, and the pairs of each optimizer step, in an order that a resumed run goes on with."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from components.batch import Batch
from components.data.preferences import PairFormat, load_pairs, read_pairs
from components.data.text import as_messages, load_tokenizer
from components.data.tiny_model import learnt_tokenizer, tiny_model
from components.engines.causal import without_progress_bars
from core import ConfigError

from .config import NEW_FROM_TEXT, RewardModelConfig

FIRST_ROWS = 100
"""So many are looked at before any process starts."""
BYTES_ALONE = 259
"""The smallest vocabulary that is learnt: pad, bos and eos, and every byte."""
VOCABULARY = 2048
"""Tokens of a new model, and 0.26 of its 0.66 million weights."""


def pair_format(config: RewardModelConfig, source: str) -> PairFormat:
    """Where the rows of a source have their pairs; a task's have it where they always do."""
    if source.startswith("task:"):
        return PairFormat(
            prompt_key="prompt", apply_chat_template=config.apply_chat_template, with_margin=config.margin_loss
        )
    return PairFormat(
        prompt_key=config.prompt_key,
        chosen_key=config.chosen_key,
        rejected_key=config.rejected_key,
        apply_chat_template=config.apply_chat_template,
        input_template=config.input_template,
        with_margin=config.margin_loss,
    )


def check_rows(config: RewardModelConfig, model_path: str) -> None:
    """See that the model has a tokenizer, and that the first rows hold pairs.

    Raises:
        ConfigError: one of them does not; the message says what to set.
    """
    option = "pretrain"
    try:
        if config.pretrain == NEW_FROM_TEXT:
            tokenizer = learnt_tokenizer([], BYTES_ALONE)
        else:
            tokenizer = load_tokenizer(model_path, chat_template=config.tokenizer_chat_template, pad_with_end=True)
        for option, split in (("dataset", config.dataset_split), ("eval_dataset", config.eval_split)):
            if source := getattr(config, option):
                rows = load_pairs(source, split=split, max_rows=FIRST_ROWS)
                read_pairs(rows, pair_format(config, source), tokenizer)
    except ValueError as error:
        raise ConfigError(f"{option}={getattr(config, option)}: {error}") from error


def write_new_model(rows: list[dict[str, Any]], form: PairFormat, config: RewardModelConfig, folder: str) -> None:
    """Make an untrained model with a vocabulary learnt from the texts of these pairs."""
    tokenizer = learnt_tokenizer(_texts(rows, form), VOCABULARY)
    with without_progress_bars():
        tiny_model(tokenizer, config.seed, max_positions=config.max_len).save_pretrained(Path(folder))
    tokenizer.save_pretrained(folder)


def _texts(rows: list[dict[str, Any]], form: PairFormat) -> Iterator[str]:
    for row in rows:
        for column in filter(None, (form.prompt_key, form.chosen_key, form.rejected_key)):
            # What is wrong with a row is said when it is read as a pair.
            if isinstance(row.get(column), str | list):
                yield from (str(message.get("content")) for message in as_messages(row[column]))


def check_shares(ranks: int, train: Batch, heldout: Batch | None) -> None:
    """See that every rank gets an answer of a batch that is split over the ranks.

    Raises:
        ValueError: there are too few; the message says what to set.
    """
    ways = {"train on": (train, "give more"), "judge": (heldout, "set eval_samples higher, give a longer eval_dataset")}
    for use, (batch, mend) in ways.items():
        if batch is not None and len(batch) < ranks:
            raise ValueError(
                f"{len(batch)} answers to {use} are too few for {ranks} ranks, each of which takes one or more; "
                f"{mend}, or set num_gpus_per_node lower"
            )


class Accuracy:
    """Share of the held-out pairs that are told right, before training and last."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}
        """By "start" and "end"."""

    def add(self, accuracy: float) -> None:
        """Note the newest one."""
        self.of = {"start": accuracy} | self.of | {"end": accuracy}

    def state_dict(self) -> dict[str, Any]:
        """What was noted."""
        return dict(self.of)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was noted before."""
        self.of = dict(state)
