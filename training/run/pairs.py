"""Pairs of responses as token batches: those to train on, and those held out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from components.data.preferences import (
    Pair,
    PreferenceData,
    encode_pairs,
    hold_out,
    read_pairs,
    select_pairs,
)
from components.data.shares import check_shares
from training.options.supervised_options import Rows
from training.run.supervised_run import TrainingData

if TYPE_CHECKING:
    from training.options.pair_options import PairOptions


def read_training_pairs(
    config: PairOptions, model_path: str, info: Callable[[str], None], *, with_mask: bool = False
) -> TrainingData:
    """The pairs to train on, and those to evaluate on: of `evaluation.path`, or whole conversations of `data.path`.

    Args:
        config: where they are.
        model_path: of the model that is to read them.
        info: shows how many cannot be used.
        with_mask: as of `encode_pairs`.
    """
    tokenizer = config.tokenizer(model_path)

    def read(rows: Rows, source: str) -> list[Pair]:
        pairs = read_pairs(rows, config.pair_format(source), tokenizer)
        if empty := sum(not pair.prompt.strip() for pair in pairs):
            info(f"{source}: {empty} of {len(pairs)} pairs have no prompt; all of their text is response")
        if repeated := sum(_repeats_prompt(pair) for pair in pairs):
            info(
                f"{source}: in {repeated} of {len(pairs)} pairs both responses begin with the prompt once more, which "
                "the model reads twice; set data.ignored_columns to its column if that is not meant"
            )
        return pairs

    def encoded(pairs: list[Pair]) -> PreferenceData:
        found = encode_pairs(pairs, tokenizer, max_tokens=config.data.max_tokens, with_mask=with_mask)
        left_out = ", ".join(f"{count} {reason}" for reason, count in found.dropped.items())
        info(f"{len(found)} of {len(pairs)} pairs can be used (left out: {left_out}); {found.repeated} are repeated")
        return found

    found = encoded(config.training_examples(read, info))
    for line in found.describe_first(tokenizer):
        info(line)
    train = found.batch
    heldout = None
    if config.evaluation.path:
        heldout = encoded(config.evaluation_examples(read)).batch
    elif config.evaluation.held_out:
        train_P, heldout_P = hold_out(found.openings, config.evaluation.held_out, config.seed)
        train = select_pairs(found.batch, train_P)
        heldout = select_pairs(found.batch, heldout_P)
    check_shares(config.placement.ranks, train, heldout)
    return TrainingData(model_path, tokenizer, train, heldout)


def _repeats_prompt(pair: Pair) -> bool:
    prompt = pair.prompt.strip()
    return bool(prompt) and all(text.lstrip().startswith(prompt) for text in (pair.chosen, pair.rejected))
