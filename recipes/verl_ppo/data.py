"""The checks of a run's inputs. Nothing is imported here that needs torch, before a model of the user's own has to be
looked at.
"""

from agents.loading import check_agent
from components.data.text import load_tokenizer, same_vocabulary
from components.hub import find_model
from training.inputs import check_model, check_template
from training.schema import ConfigError
from training.warm_start import WARM_START_PREFIX

from .config import VerlPPOConfig
from .reward import check_rewards


def check_inputs(config: VerlPPOConfig) -> int:
    """See that models, data and reward can be there and fit together, before any process starts; how many prompts there
    are.

    Raises:
        ConfigError: one of them cannot; the message says what to set.
    """
    try:
        check_model(config.model.path)
        if config.needs_critic and config.critic.path:
            check_model(config.critic.path, "critic.path")
        if config.reward.model_path:
            _check_reward_model(config)
        if config.agent.func_path is not None:
            check_agent(config.agent.func_path)
        rows = config.rows()
        check_rewards(config, rows, config.rows(heldout=True))
        check_template(config.model, config.data, rows, config.seed)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return len(rows)


def _check_reward_model(config: VerlPPOConfig) -> None:
    policy, path = config.model.path, config.reward.model_path
    check_model(path, "reward.model_path")
    labels = find_model(path).num_labels
    if labels != 1:
        raise ConfigError(f"reward.model_path={path} has {labels} labels; a reward model has one (num_labels=1)")
    if policy.startswith(WARM_START_PREFIX):
        return
    if not same_vocabulary(config.model.tokenizer(), load_tokenizer(path, pad_with_end=True)):
        raise ConfigError(
            f"reward.model_path={path} has another vocabulary than the policy, {policy}, so it would read other words; "
            "use one of the same family, or a function that asks a server (reward.source)"
        )
