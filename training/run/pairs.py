"""Tokenized pairs of responses for training and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from components.data.preferences import Pair, PreferenceData, hold_out, read_pairs, select_pairs
from components.data.shares import check_shares
from training.options.supervised_options import Rows
from training.run.supervised_run import TrainingData

if TYPE_CHECKING:
    from training.options.pair_options import PairOptions


def read_training_pairs(
    config: PairOptions, model_path: str, info: Callable[[str], None], *, with_mask: bool = False
) -> TrainingData:
    """Read and tokenize the pairs to train on and the held-out pairs.

    Held-out pairs come from `evaluation.path`. Without it, whole conversations of `data.path` are held out.

    Args:
        config: options with the paths of the data.
        model_path: path of the model whose tokenizer is used.
        info: prints a line for the user, such as the number of unusable pairs.
        with_mask: see `encode_pairs`.
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
        data = config.encoder()(pairs, tokenizer, max_tokens=config.data.max_tokens, with_mask=with_mask)
        left_out = ", ".join(f"{count} {reason}" for reason, count in data.dropped.items())
        total = len(data) + sum(data.dropped.values())
        info(f"{len(data)} of {total} {data.noun} can be used (left out: {left_out}); {data.repeated} are repeated")
        return data

    preferences = encoded(config.training_examples(read, info))
    for description in preferences.describe_first(tokenizer):
        info(description)
    train = preferences.batch
    heldout = None
    if config.evaluation.path:
        heldout = encoded(config.evaluation_examples(read)).batch
    elif config.evaluation.held_out:
        train_P, heldout_P = hold_out(preferences.openings, config.evaluation.held_out, config.seed)
        train = select_pairs(preferences.batch, train_P)
        heldout = select_pairs(preferences.batch, heldout_P)
    check_shares(config.placement.ranks, train, heldout)
    return TrainingData(model_path, tokenizer, train, heldout)


def _repeats_prompt(pair: Pair) -> bool:
    prompt = pair.prompt.strip()
    return bool(prompt) and all(text.lstrip().startswith(prompt) for text in (pair.chosen, pair.rejected))
