"""Checks of critic and reward models before a run starts. torch is imported only if a user's model has to be read."""

from collections.abc import Collection

from components.data.values import label_text
from components.models.sources import is_made
from components.net.hub_requests import find_model
from components.registry import load
from components.rewards.base import check_reward
from components.rewards.scorers import get_scorer, scorer_names
from training.launch.reader_checks import check_reader, check_reward_model

from .config import PPOConfig


def check_models(config: PPOConfig, absent: Collection[str] = ()) -> list[str]:
    """Check the critic, the reward models and the score of held-out responses before any process starts.

    Args:
        config: configuration of the run.
        absent: options whose models are missing on this machine. They are not checked.

    Returns:
        The notes of `try_rewards`.

    Raises:
        ValueError: one of them cannot be used.
    """
    heldout_source = config.reward.heldout_source
    for i, path in enumerate(config.reward_model.paths):
        if {"model.path", f"reward_model.path[{i}]"} & set(absent):
            continue
        check_reward_model(path, "reward_model.path", config.model)
        if config.reward_model.normalize and not is_made(path):
            _check_statistics(path)
    if config.needs_critic and config.critic.path and "critic.path" not in absent:
        check_reader(config.critic.path, "critic.path", config.model)
    if heldout_source is not None:
        check_reward(heldout_source)
    if heldout_source in scorer_names() and config.evaluation.path is not None:
        label = config.evaluation.rows(config.data)[0]["label"]
        get_scorer(heldout_source)("", label_text(label))  # raises if label_key names the wrong column
    if heldout_source is None or heldout_source in scorer_names() or config.evaluation.path is None:
        return []
    rows = {"the held-out data": config.evaluation.rows(config.data)}
    settings = config.reward.settings()
    try_rewards = load("reward trial", "rewards", f"reward.heldout_source={heldout_source}")
    return try_rewards(heldout_source, "reward.heldout_source", rows, settings, calls_servers=not config.dry_run)


def _check_statistics(path: str) -> None:
    from components.models.value_model import score_statistics

    try:
        score_statistics(find_model(path), path)
    except ValueError as error:
        raise ValueError(f"reward_model.path={path}: {error}") from error
