"""The checks of models, data and rewards before a run starts. Nothing is imported here that needs torch, before a model
of the user's own has to be looked at.
"""

from agents.loading import check_agent
from components.data.rewards import check_reward
from components.data.scorers import get_scorer, scorer_names
from components.data.text import load_tokenizer, same_vocabulary
from components.hub import find_model
from training.inputs import check_prompts
from training.options import ModelOptions
from training.schema import ConfigError
from training.warm_start import WARM_START_PREFIX

from .config import PPOConfig
from .options import shared_options


def check_inputs(config: PPOConfig) -> int:
    """See that model, data and reward can be there, before any process starts; how many prompts there are.

    Raises:
        ValueError: one of them cannot; the message says what to set.
    """
    shared = shared_options(config)
    for path in config.reward_models:
        _check_model("reward_pretrain", path, config.normalize_reward)
    if config.needs_critic and config.critic_pretrain:
        _check_model("critic_pretrain", config.critic_pretrain, config.normalize_reward)
    if config.agent_func_path is not None:
        check_agent(config.agent_func_path)
    count = check_prompts(shared.model, shared.data, shared.evaluation, config.reward_code, config.seed)
    if config.eval_scorer is not None:
        check_reward(config.eval_scorer)
    if config.eval_scorer in scorer_names():
        label = shared.evaluation.rows(shared.data)[0]["label"]
        get_scorer(config.eval_scorer)("", str(label))  # one that it cannot read is a wrong label_key
    _check_vocabulary(config, shared.model)
    if shared.steps(count * config.num_episodes) < 1:
        least = f"rollout_batch_size={config.rollout_batch_size}"
        remedy = "lower it, or raise max_samples or num_episodes"
        raise ConfigError(f"{config.prompt_data} gives {count} prompts, fewer than {least}; {remedy}")
    return count


def _check_model(option: str, path: str, normalize: bool) -> None:
    if path.startswith(WARM_START_PREFIX):
        return
    try:
        found = find_model(path)
        if option == "reward_pretrain" and found.num_labels != 1:
            raise ValueError(f"it has {found.num_labels} labels; a reward model has one (num_labels=1)")
        if option == "reward_pretrain" and normalize:
            from components.engines.causal import score_statistics

            score_statistics(found, path)
    except ValueError as error:
        raise ConfigError(f"{option}={path}: {error}") from error


def _check_vocabulary(config: PPOConfig, policy: ModelOptions) -> None:
    if policy.path.startswith(WARM_START_PREFIX):
        return
    for path in config.reward_models:
        if not same_vocabulary(policy.tokenizer(), load_tokenizer(path, pad_token=config.pad_token)):
            raise ConfigError(
                f"reward_pretrain={path} has another vocabulary than pretrain={config.pretrain}, so it would read "
                "other words; serve it, and give its remote_rm_url"
            )
