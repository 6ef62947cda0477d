"""What the flat options mean as the groups that recipes share, and the checks of the inputs. Nothing is imported here
that needs torch, before a model of the user's own has to be looked at.
"""

from typing import Any

from agents.loading import check_agent
from components.data.rewards import check_reward
from components.data.scorers import get_scorer, scorer_names
from components.data.text import load_tokenizer, same_vocabulary
from components.hub import find_model
from training.config import ConfigError
from training.options import DataOptions, EvaluationOptions, ModelOptions, check_rows, check_template
from training.tracking import WandbConfig
from training.warm_start import WARM_START_PREFIX

from .config import PPOConfig


def model_options(config: PPOConfig) -> ModelOptions:
    """The policy's start."""
    return ModelOptions(path=config.pretrain, chat_template=config.tokenizer_chat_template, pad_token=config.pad_token)


def data_options(config: PPOConfig) -> DataOptions:
    """The prompts to train on."""
    return DataOptions(
        path=config.prompt_data,
        probs=config.prompt_data_probs,
        split=config.prompt_split,
        input_key=config.input_key,
        label_key=config.label_key,
        apply_chat_template=config.apply_chat_template,
        input_template=config.input_template,
        max_rows=config.max_samples,
        max_prompt_tokens=config.prompt_max_len,
        passes=config.num_episodes,
    )


def evaluation_options(config: PPOConfig) -> EvaluationOptions:
    """The held-out prompts."""
    return EvaluationOptions(
        path=config.eval_dataset,
        split=config.eval_split,
        max_rows=config.max_eval_samples,
        every=config.eval_steps,
        temperature=config.eval_temperature,
        samples_per_prompt=config.eval_n_samples_per_prompt,
        best_metric=config.best_eval_metric_key,
    )


def check_inputs(config: PPOConfig) -> int:
    """See that model, data and reward can be there, before any process starts; how many prompts there are.

    Raises:
        ConfigError: one of them cannot; the message says what to set.
    """
    models = [("pretrain", config.pretrain)]
    if config.needs_critic and config.critic_pretrain:
        models.append(("critic_pretrain", config.critic_pretrain))
    models += [("reward_pretrain", path) for path in config.reward_models]
    try:
        for option, path in models:
            _check_model(option, path, config.normalize_reward)
        if config.reward_code is not None:
            check_reward(config.reward_code)
        if config.eval_scorer is not None:
            check_reward(config.eval_scorer)
        if config.agent_func_path is not None:
            check_agent(config.agent_func_path)
        rows = check_rows(data_options(config), evaluation_options(config), config.reward_code, config.seed)
        if config.eval_scorer in scorer_names():
            label = evaluation_options(config).rows(data_options(config))[0]["label"]
            get_scorer(config.eval_scorer)("", str(label))  # one that it cannot read is a wrong label_key
        _check_tokenizer(config, rows)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.steps(len(rows)) < 1:
        raise ConfigError(
            f"{config.prompt_data} gives {len(rows)} prompts, fewer than rollout_batch_size="
            f"{config.rollout_batch_size}; lower it, or raise max_samples or num_episodes"
        )
    return len(rows)


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


def _check_tokenizer(config: PPOConfig, rows: list[dict[str, Any]]) -> None:
    model = model_options(config)
    check_template(model, data_options(config), rows, config.seed)
    if config.pretrain.startswith(WARM_START_PREFIX):
        return
    for path in config.reward_models:
        if not same_vocabulary(model.tokenizer(), load_tokenizer(path, pad_token=config.pad_token)):
            raise ConfigError(
                f"reward_pretrain={path} has another vocabulary than pretrain={config.pretrain}, so it would read "
                "other words; serve it, and give its remote_rm_url"
            )


def wandb_options(config: PPOConfig) -> WandbConfig | None:
    """Where W&B shows the run; None when it is off."""
    return WandbConfig.asked(
        config.use_wandb,
        org=config.wandb_org,
        project=config.wandb_project,
        group=config.wandb_group,
        run_name=config.wandb_run_name,
    )
