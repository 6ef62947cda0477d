"""The checks of critic and reward models before a run starts. Nothing is imported here that needs torch, before a model
of the user's own has to be looked at.
"""

from components.data.rewards import check_reward
from components.data.scorers import get_scorer, scorer_names
from components.data.text import load_tokenizer, same_vocabulary
from components.hub import find_model
from training.schema import ConfigError
from training.warm_start import WARM_START_PREFIX

from .config import PPOConfig


def check_models(config: PPOConfig) -> None:
    """See that critic, reward models and what scores held-out responses can be there, before any process starts.

    Raises:
        ValueError: one of them cannot; the message says what to set.
    """
    normalize, heldout_source = config.reward_model.normalize, config.reward.heldout_source
    for path in config.reward_model.paths:
        _check_model("reward_model.path", path, normalize)
    if config.needs_critic and config.critic.path:
        _check_model("critic.path", config.critic.path, normalize)
    if heldout_source is not None:
        check_reward(heldout_source)
    if heldout_source in scorer_names() and config.evaluation.path is not None:
        label = config.evaluation.rows(config.data)[0]["label"]
        get_scorer(heldout_source)("", str(label))  # one that it cannot read is a wrong label_key
    _check_vocabulary(config)


def _check_model(option: str, path: str, normalize: bool) -> None:
    if path.startswith(WARM_START_PREFIX):
        return
    try:
        found = find_model(path)
        if option == "reward_model.path" and found.num_labels != 1:
            raise ValueError(f"it has {found.num_labels} labels; a reward model has one (num_labels=1)")
        if option == "reward_model.path" and normalize:
            from components.engines.causal import score_statistics

            score_statistics(found, path)
    except ValueError as error:
        raise ConfigError(f"{option}={path}: {error}") from error


def _check_vocabulary(config: PPOConfig) -> None:
    policy = config.model
    if policy.path.startswith(WARM_START_PREFIX):
        return
    for path in config.reward_model.paths:
        if not same_vocabulary(policy.tokenizer(), load_tokenizer(path, pad_token=policy.pad_token)):
            raise ConfigError(
                f"reward_model.path={path} has another vocabulary than model.path={policy.path}, so it would read "
                "other words; serve it, and give its URL as reward.source"
            )
