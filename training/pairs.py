"""Pairs of responses as token batches: those to train on, and those held out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from components.data.preferences import (
    PreferenceData,
    check_shares,
    encode_pairs,
    hold_out,
    load_pairs,
    read_pairs,
    select_pairs,
)
from training.supervised_run import TrainingData

if TYPE_CHECKING:
    from training.supervised_options import PairOptions


def read_training_pairs(
    config: PairOptions, model_path: str, info: Callable[[str], None], *, with_mask: bool = False
) -> TrainingData:
    """The pairs to train on, and those to evaluate on: of `eval_dataset`, or whole conversations of `dataset`.

    Args:
        config: where they are.
        model_path: of the model that is to read them.
        info: shows how many cannot be used.
        with_mask: as of `encode_pairs`.
    """
    tokenizer = config.tokenizer(model_path)

    def encoded(source: str, split: str, max_rows: int | None = None) -> PreferenceData:
        rows = load_pairs(source, split=split, max_rows=max_rows, seed=config.seed)
        pairs = read_pairs(rows, config.pair_format(source), tokenizer)
        found = encode_pairs(pairs, tokenizer, max_tokens=config.max_len, with_mask=with_mask)
        left_out = ", ".join(f"{count} {reason}" for reason, count in found.dropped.items())
        info(f"{len(found)} of {len(rows)} pairs can be used (left out: {left_out}); {found.repeated} are repeated")
        return found

    found = encoded(config.dataset, config.dataset_split, config.max_samples)
    train = found.batch
    heldout = None
    if config.eval_dataset:
        heldout = encoded(config.eval_dataset, config.eval_split).batch
    elif config.eval_samples:
        train_P, heldout_P = hold_out(found.openings, config.eval_samples, config.seed)
        train = select_pairs(found.batch, train_P)
        heldout = select_pairs(found.batch, heldout_P)
    check_shares(config.ranks, train, heldout)
    return TrainingData(model_path, tokenizer, train, heldout)
