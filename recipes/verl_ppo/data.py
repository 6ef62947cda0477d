"""The checks of a run's inputs. Nothing is imported here that needs torch, before a model of the user's own has to be
looked at.
"""

from components.data.cells import check_one_kind
from training.inputs import check_encoding, check_model, check_reward_model
from training.schema import ConfigError

from .config import VerlPPOConfig
from .reward import check_rewards


def check_inputs(config: VerlPPOConfig, notes: list[str] | None = None) -> int:
    """See that models, data and reward can be there and fit together, before any process starts; how many prompts there
    are. `notes` gets how many rows are left out.

    Raises:
        ConfigError: one of them cannot; the message says what to set.
    """
    try:
        check_model(config.model.path)
        if config.needs_critic and config.critic.path:
            check_model(config.critic.path, "critic.path")
        if config.reward.model_path:
            check_reward_model(config.reward.model_path, "reward.model_path", config.model)
        rows, heldout = config.rows(notes=notes), config.rows(heldout=True, notes=notes)
        for path, some in ((config.data.path, rows), (config.evaluation.path, heldout)):
            check_one_kind((row["input"] for row in some), str(path))
        check_rewards(config, rows, heldout)
        most = None if config.agent.func_path else config.rollout.max_new_tokens
        too_long = check_encoding(config.model, config.data, rows, config.seed, most)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return len(rows) - too_long
