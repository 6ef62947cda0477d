"""A new model, made from the texts of pairs."""

from components.data.preferences import load_pairs, pair_texts
from components.data.tiny_model import learnt_tokenizer, tiny_model
from components.engines.causal import without_progress_bars

from .config import NEW_FROM_TEXT, RewardModelConfig

VOCABULARY = 2048
"""Tokens of a new model, and 0.26 of its 0.66 million weights."""


def starting_model(config: RewardModelConfig, scratch: str) -> str:
    """Path of the model to load: the user's, or a new one in the folder `scratch`, with a vocabulary learnt from the
    texts of the dataset.
    """
    if config.pretrain != NEW_FROM_TEXT:
        return config.pretrain
    rows = load_pairs(config.dataset, split=config.dataset_split, max_rows=config.max_samples, seed=config.seed)
    tokenizer = learnt_tokenizer(pair_texts(rows, config.pair_format(config.dataset)), VOCABULARY)
    with without_progress_bars():
        tiny_model(tokenizer, config.seed, max_positions=config.max_len).save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    return scratch
