"""Where rows have their pairs, and the pairs of each optimizer step, in an order that a resumed run goes on with."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from components.batch import Batch
from components.data.preferences import PairFormat, load_pairs, read_pairs
from components.data.text import load_tokenizer, same_vocabulary
from core import ConfigError

from .algorithm import PAIR
from .config import DPOConfig

FIRST_ROWS = 100
"""So many are looked at before any process starts."""
PAIRS_PER_CALL = 1024
"""That a rank is asked about at once, at most."""


def pair_format(config: DPOConfig, source: str) -> PairFormat:
    """Where the rows of a source have their pairs; a task's have it where they always do."""
    if source.startswith("task:"):
        return PairFormat(prompt_key="prompt", apply_chat_template=config.apply_chat_template)
    return PairFormat(
        prompt_key=config.prompt_key,
        chosen_key=config.chosen_key,
        rejected_key=config.rejected_key,
        apply_chat_template=config.apply_chat_template,
        input_template=config.input_template,
    )


def check_rows(config: DPOConfig) -> None:
    """See that both models read the same tokens, and that the first rows hold pairs.

    Raises:
        ConfigError: one of them does not; the message says what to set.
    """
    option = "pretrain"
    try:
        tokenizer = load_tokenizer(config.pretrain, chat_template=config.tokenizer_chat_template, pad_with_end=True)
        option = "ref_pretrain"
        reference = config.ref_pretrain
        if reference and not same_vocabulary(tokenizer, load_tokenizer(reference, pad_with_end=True)):
            raise ValueError(
                f"it has another vocabulary than pretrain={config.pretrain}, so it would read other words; set it to "
                "a model of the same family"
            )
        for option, split in (("dataset", config.dataset_split), ("eval_dataset", config.eval_split)):
            if source := getattr(config, option):
                rows = load_pairs(source, split=split, max_rows=FIRST_ROWS)
                read_pairs(rows, pair_format(config, source), tokenizer)
    except ValueError as error:
        raise ConfigError(f"{option}={getattr(config, option)}: {error}") from error


def in_calls(batch: Batch, ranks: int) -> list[Batch]:
    """A batch in equal parts, none so large that stall_timeout could take a rank that works on it for hung."""
    count = -(-len(batch) // (PAIR * PAIRS_PER_CALL * ranks))
    edges = [len(batch) * part // count for part in range(count + 1)]
    return [batch[start:end] for start, end in pairwise(edges)]


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
