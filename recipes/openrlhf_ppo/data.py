"""Which rows the recipe trains and is evaluated on, and its inputs' checks. Nothing here imports torch."""

from pathlib import Path
from typing import Any

from components.data.prompts import TASK_PREFIX, load_rows
from components.data.scorers import check_reward
from components.tracking import WandbConfig
from core import ConfigError

from .config import PPOConfig


def train_rows(config: PPOConfig) -> list[dict[str, Any]]:
    """Prompts and labels to train on."""
    return load_rows(
        config.prompt_data, config.input_key, config.label_key, max_rows=config.max_samples, seed=config.seed
    )


def eval_rows(config: PPOConfig) -> list[dict[str, Any]]:
    """Held-out prompts and labels; none without an eval_dataset. The same for every seed, so that runs compare."""
    if config.eval_dataset is None:
        return []
    return load_rows(
        config.eval_dataset,
        config.input_key,
        config.label_key,
        split="heldout",
        max_rows=config.max_eval_samples,
    )


def check_inputs(config: PPOConfig) -> None:
    """See that model, data and reward can be there, before any process starts.

    Raises:
        ConfigError: one of them cannot; the message says what to set.
    """
    for option, path in (("pretrain", config.pretrain), ("critic_pretrain", config.critic_pretrain)):
        if path and ("/" in path and path[0] in "./~") and not (Path(path).expanduser() / "config.json").is_file():
            raise ConfigError(f"{option}={path}: there is no model (no config.json in it); give a folder that has one")
    try:
        check_reward(config.reward)
        prompts = len(train_rows(config))
        eval_rows(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.steps(prompts) < 1:
        source = "task" if config.prompt_data.startswith(TASK_PREFIX) else "file"
        raise ConfigError(
            f"the {source} {config.prompt_data} gives {prompts} prompts, fewer than rollout_batch_size="
            f"{config.rollout_batch_size}; lower it, or raise max_samples or num_episodes"
        )


def wandb_options(config: PPOConfig) -> WandbConfig | None:
    """Where W&B shows the run; None when it is off."""
    if config.use_wandb is None or config.use_wandb.lower() == "false":
        return None
    return WandbConfig(
        key=None if config.use_wandb.lower() == "true" else config.use_wandb,
        project=config.wandb_project,
        group=config.wandb_group,
        run_name=config.wandb_run_name,
    )
