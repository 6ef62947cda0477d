"""Checks of models that read the tokens of a policy: critics, references and reward models."""

from __future__ import annotations

import sys

from components.models.sources import is_made
from components.net.hub_requests import find_model
from training.launch.model_checks import check_model
from training.options.model_options import ModelOptions


def check_reward_model(path: str, option: str, policy: ModelOptions) -> None:
    """Check that the reward model that an option names exists, has one label, and has the vocabulary of the policy.

    Raises:
        ValueError: a check fails. The message says what to set.
    """
    from components.data.text import load_tokenizer, same_vocabulary

    check_model(path, option)
    if is_made(path):
        return
    labels = find_model(path).num_labels
    if labels != 1:
        raise ValueError(f"{option}={path}: it has {labels} labels; a reward model has one (num_labels=1)")
    if is_made(policy.path):
        return
    if not same_vocabulary(policy.tokenizer(), load_tokenizer(path, pad_token=policy.pad_token, pad_with_end=True)):
        raise ValueError(
            f"{option}={path} has another vocabulary than model.path={policy.path}, so it would misread its tokens; "
            "use a model of the same family, or serve this one and set reward.source to its URL"
        )
    check_reader(path, option, policy)


def check_reader(path: str, option: str, policy: ModelOptions) -> None:
    """Check that the model that an option names exists and has an embedding for each token of the policy.

    Raises:
        ValueError: a check fails. The message says what to set.
    """
    check_model(path, option)
    if is_made(path) or is_made(policy.path):
        return
    rows = getattr(find_model(path).get_text_config(), "vocab_size", sys.maxsize)
    policy_rows = getattr(find_model(policy.path).get_text_config(), "vocab_size", sys.maxsize)
    # Embedding rows beyond the tokenizer are padding. The policy does not learn to sample them, so they need no match.
    tokens = min(len(policy.tokenizer()), policy_rows)
    if tokens > rows:
        raise ValueError(
            f"{option}={path} has {rows} rows in its embedding (vocab_size), but model.path={policy.path} can generate "
            f"{tokens} different tokens; use a model with at least as many rows"
        )
