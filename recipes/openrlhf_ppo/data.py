"""The checks of critic and reward models before a run starts. Nothing is imported here that needs torch, before a model
of the user's own has to be looked at.
"""

from components.data.cells import label_text
from components.data.rewards import check_reward
from components.data.scorers import get_scorer, scorer_names
from components.hub import find_model
from training.inputs import check_model, check_reward_model
from training.warm_start import WARM_START_PREFIX

from .config import PPOConfig


def check_models(config: PPOConfig) -> None:
    """See that critic, reward models and what scores held-out responses can be there, before any process starts.

    Raises:
        ValueError: one of them cannot; the message says what to set.
    """
    own, heldout_source = config.reward_model, config.reward.heldout_source
    for path in own.paths:
        check_reward_model(path, "reward_model.path", config.model)
        if own.normalize and not path.startswith(WARM_START_PREFIX):
            _check_statistics(path)
    if config.needs_critic and config.critic.path:
        check_model(config.critic.path, "critic.path")
    if heldout_source is not None:
        check_reward(heldout_source)
    if heldout_source in scorer_names() and config.evaluation.path is not None:
        label = config.evaluation.rows(config.data)[0]["label"]
        get_scorer(heldout_source)("", label_text(label))  # one that it cannot read is a wrong label_key


def _check_statistics(path: str) -> None:
    from components.engines.causal import score_statistics

    try:
        score_statistics(find_model(path), path)
    except ValueError as error:
        raise ValueError(f"reward_model.path={path}: {error}") from error
