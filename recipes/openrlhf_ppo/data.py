"""Which rows the recipe trains and is evaluated on, and its inputs' checks. Nothing is imported here that needs torch,
before a model of the user's own has to be looked at.
"""

from typing import TYPE_CHECKING, Any

from components.data.prompts import PromptSource, load_rows
from components.data.rewards import check_reward
from components.data.scorers import get_scorer
from components.data.text import load_tokenizer, same_vocabulary
from components.hub import find_model
from components.tracking import WandbConfig
from components.warm_start import WARM_START_PREFIX
from core import ConfigError

from .config import PPOConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def train_rows(config: PPOConfig) -> list[dict[str, Any]]:
    """Prompts and labels to train on."""
    return load_rows(
        config.prompt_data,
        config.input_key,
        config.label_key,
        split=config.prompt_split,
        max_rows=config.max_samples,
        seed=config.seed,
        probs=config.prompt_data_probs,
    )


def eval_rows(config: PPOConfig) -> list[dict[str, Any]]:
    """Held-out prompts and labels; none without an eval_dataset. The same for every seed, so that runs compare."""
    if config.eval_dataset is None:
        return []
    return load_rows(
        config.eval_dataset,
        config.input_key,
        config.label_key,
        split=config.eval_split,
        heldout=True,
        max_rows=config.max_eval_samples,
    )


def open_tokenizer(config: PPOConfig, path: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model, with the chat template and the pad token that the configuration gives it."""
    return load_tokenizer(path, chat_template=config.tokenizer_chat_template, pad_token=config.pad_token)


def prompt_source(
    rows: list[dict[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    config: PPOConfig,
    shuffle: bool,
    max_prompt_tokens: int | None,
) -> PromptSource:
    """Prompts as token ids."""
    return PromptSource(
        rows,
        tokenizer,
        config.seed,
        shuffle=shuffle,
        apply_chat_template=config.apply_chat_template,
        input_template=config.input_template,
        max_prompt_tokens=max_prompt_tokens,
    )


def check_inputs(config: PPOConfig) -> None:
    """See that model, data and reward can be there, before any process starts.

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
        rows = train_rows(config)
        heldout = eval_rows(config)
        if config.scorer is not None:
            # A label that the scorer cannot read is a wrong label_key; one row shows it.
            for row in (rows[0], *heldout[:1]):
                get_scorer(config.scorer)("", str(row["label"]))
        if not config.pretrain.startswith(WARM_START_PREFIX):
            _check_tokenizer(config, rows)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.steps(len(rows)) < 1:
        raise ConfigError(
            f"{config.prompt_data} gives {len(rows)} prompts, fewer than rollout_batch_size="
            f"{config.rollout_batch_size}; lower it, or raise max_samples or num_episodes"
        )


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
    tokenizer = open_tokenizer(config, config.pretrain)
    # One prompt shows whether template and tokenizer fit together; the trainer reads them all.
    prompt_source(rows[:1], tokenizer, config, shuffle=False, max_prompt_tokens=None)
    for path in config.reward_models:
        if not same_vocabulary(tokenizer, load_tokenizer(path, pad_token=config.pad_token)):
            raise ConfigError(
                f"reward_pretrain={path} has another vocabulary than pretrain={config.pretrain}, so it would read "
                "other words; serve it, and give its remote_rm_url"
            )


def wandb_options(config: PPOConfig) -> WandbConfig | None:
    """Where W&B shows the run; None when it is off."""
    if config.use_wandb is None or config.use_wandb.lower() == "false":
        return None
    return WandbConfig(
        key=None if config.use_wandb.lower() == "true" else config.use_wandb,
        org=config.wandb_org,
        project=config.wandb_project,
        group=config.wandb_group,
        run_name=config.wandb_run_name,
    )
