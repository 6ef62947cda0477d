"""Where rows have their pairs, and a new model made from their texts."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from components.data.preferences import PairFormat, read_pairs
from components.data.text import as_messages, load_tokenizer
from components.data.tiny_model import learnt_tokenizer, tiny_model
from components.engines.causal import without_progress_bars
from training.config import ConfigError

from .config import NEW_FROM_TEXT, RewardModelConfig

BYTES_ALONE = 259
"""The smallest vocabulary that is learnt: pad, bos and eos, and every byte."""
VOCABULARY = 2048
"""Tokens of a new model, and 0.26 of its 0.66 million weights."""


def pair_format(config: RewardModelConfig) -> PairFormat:
    """Where rows have their pairs."""
    return PairFormat(
        prompt_key=config.prompt_key,
        chosen_key=config.chosen_key,
        rejected_key=config.rejected_key,
        apply_chat_template=config.apply_chat_template,
        input_template=config.input_template,
        with_margin=config.margin_loss,
    )


def check_rows(config: RewardModelConfig, model_path: str, rows: Mapping[str, list[dict[str, Any]]]) -> None:
    """See that the model has a tokenizer, and that these rows, by the option that named their source, hold pairs.

    Raises:
        ConfigError: one of them does not; the message says what to set.
    """
    option = "pretrain"
    try:
        if config.pretrain == NEW_FROM_TEXT:
            tokenizer = learnt_tokenizer([], BYTES_ALONE)
        else:
            tokenizer = load_tokenizer(model_path, chat_template=config.tokenizer_chat_template, pad_with_end=True)
        for option, some in rows.items():
            read_pairs(some, pair_format(config).of(config.sources[option][0]), tokenizer)
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
