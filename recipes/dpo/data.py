"""Where rows have their pairs, and how many a rank is asked about at once."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from components.batch import Batch
from components.data.preferences import PairFormat, read_pairs
from components.data.text import load_tokenizer, same_vocabulary
from training.config import ConfigError

from .algorithm import PAIR
from .config import DPOConfig

PAIRS_PER_CALL = 1024
"""That a rank is asked about at once, at most."""


def pair_format(config: DPOConfig) -> PairFormat:
    """Where rows have their pairs."""
    return PairFormat(
        prompt_key=config.prompt_key,
        chosen_key=config.chosen_key,
        rejected_key=config.rejected_key,
        apply_chat_template=config.apply_chat_template,
        input_template=config.input_template,
    )


def check_rows(config: DPOConfig, rows: Mapping[str, list[dict[str, Any]]]) -> None:
    """See that both models read the same tokens, and that these rows hold pairs.

    Args:
        config: with the models as folders or hub names.
        rows: by the option that named their source.

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
        for option, some in rows.items():
            read_pairs(some, pair_format(config).of(config.sources[option][0]), tokenizer)
    except ValueError as error:
        raise ConfigError(f"{option}={getattr(config, option)}: {error}") from error


def in_calls(batch: Batch, ranks: int) -> list[Batch]:
    """A batch in equal parts, none so large that stall_timeout could take a rank that works on it for hung."""
    count = -(-len(batch) // (PAIR * PAIRS_PER_CALL * ranks))
    edges = [len(batch) * part // count for part in range(count + 1)]
    return [batch[start:end] for start, end in pairwise(edges)]
