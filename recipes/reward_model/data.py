"""A new model, made from the texts of pairs."""

from itertools import chain

from components.data.preferences import pair_texts
from components.models.loading import without_progress_bars
from components.models.sources import new_model

from .config import NEW_FROM_TEXT, RewardModelConfig

VOCABULARY = 2048
"""Tokens of a new model, and 0.26 of its 0.66 million weights."""


def starting_model(config: RewardModelConfig, scratch: str) -> str:
    """Path of the model to load: the user's, or a new one in the folder `scratch`, with a vocabulary learnt from the
    texts of the data.
    """
    if config.model.path != NEW_FROM_TEXT:
        return config.model.path
    texts = config.training_examples(lambda rows, of: [list(pair_texts([row], config.pair_format(of))) for row in rows])
    model = new_model(NEW_FROM_TEXT)
    tokenizer = model.tokenizer(chain.from_iterable(texts), VOCABULARY)
    with without_progress_bars():
        model.save(tokenizer, scratch, config.seed, config.data.max_tokens)
    tokenizer.save_pretrained(scratch)
    return scratch
