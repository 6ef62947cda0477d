"""The model to start from, which may be a new one with a vocabulary of the data."""

from itertools import chain

from components.data.preferences import pair_texts
from components.models.loading import without_progress_bars
from components.models.new_model import new_model

from .config import NEW_FROM_TEXT, RewardModelConfig

VOCABULARY = 2048
"""Vocabulary size of a new model. The embeddings are 0.26 of its 0.66 million weights."""


def starting_model(config: RewardModelConfig, scratch: str) -> str:
    """Return the path of the model to load: `model.path`, or a new model that is written to the folder `scratch`.

    The vocabulary of a new model is trained on the texts of the data.
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
