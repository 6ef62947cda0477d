"""The prompts: rows in verl's format, what is handed out of them, and the checks of a run's inputs. Nothing is imported
here that needs torch, before a model of the user's own has to be looked at.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agents.loading import check_agent
from components.data.prompts import PromptSource
from components.data.tasks import get_task
from components.data.text import load_tokenizer, same_vocabulary
from components.data.verl_rows import load_verl_rows
from components.hub import find_model
from training.config import ConfigError
from training.warm_start import WARM_START_PREFIX

from .config import VerlPPOConfig, refuse
from .reward import check_rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELDOUT_SEED = 0
"""Draws held-out prompts, the same ones whatever the run's seed, so that runs compare."""


def read_rows(config: VerlPPOConfig, heldout: bool = False) -> list[dict[str, Any]]:
    """The rows to train on, or those that validate, of which there may be none, as `load_rows` gives them, with
    `extra_info` where a row has it.
    """
    own = config.data
    files, limit = (own.val_files, own.val_max_samples) if heldout else (own.train_files, own.train_max_samples)
    return load_verl_rows(
        files,
        prompt_key=own.prompt_key,
        source_key=own.reward_fn_key,
        # A reward model reads the answers alone, and an agent's world has rewards of its own.
        needs_truth=not (config.needs_reward_model or config.agent.func_path),
        single_turn=config.agent.func_path is None,
        heldout=heldout,
        max_rows=limit if limit > 0 else None,
        draw=own.shuffle and not heldout,
        seed=HELDOUT_SEED if heldout else data_seed(config),
    )


def data_seed(config: VerlPPOConfig) -> int:
    """Of the order of the prompts."""
    return config.seed if config.data.seed is None else config.data.seed


def prompt_source(
    config: VerlPPOConfig,
    rows: list[dict[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    heldout: bool = False,
    say: Callable[[str], None] = print,
) -> PromptSource:
    """Rows as token ids; says how many are longer than data.max_prompt_length, and what becomes of them.

    Raises:
        ValueError: one is, and data.truncation=error.
    """
    own, what = config.data, "held-out prompts" if heldout else "prompts"
    # What is refused is counted as what would be cut.
    overlong = "leave_out" if own.filter_overlong_prompts else "left" if own.truncation == "error" else own.truncation
    source = PromptSource(
        rows,
        tokenizer,
        data_seed(config),
        shuffle=own.shuffle and not heldout,
        max_prompt_tokens=own.max_prompt_length,
        overlong=overlong,
    )
    limit = f"data.max_prompt_length={own.max_prompt_length}"
    if own.truncation == "error" and source.cut:
        row, length = source.longest
        raise ValueError(
            f"{source.cut} of {len(rows)} {what} have more tokens than {limit}, the longest {length} (row {row}); "
            "raise it, leave them out with data.filter_overlong_prompts=true, or cut them with data.truncation=left, "
            "right or middle"
        )
    if not heldout and tokenizer.pad_token == tokenizer.eos_token:
        say(f"the tokenizer's end token {tokenizer.eos_token!r} pads too")
    if heldout:
        refuse({"few_heldout": len(source) < config.sampling_ranks}, c=config, count=len(source))
    if source.too_long:
        say(f"{source.too_long} {what} of more than {limit} tokens are left out")
    if source.cut:
        say(f"{source.cut} {what} of more than {limit} tokens are cut (data.truncation={own.truncation})")
    return source


def check_inputs(config: VerlPPOConfig) -> int:
    """See that models, data and reward can be there and fit together, before any process starts; how many prompts there
    are.

    Raises:
        ConfigError: one of them cannot; the message says what to set.
    """
    try:
        _check_models(config)
        if config.agent.func_path is not None:
            check_agent(config.agent.func_path)
        rows = read_rows(config)
        heldout = read_rows(config, heldout=True)
        check_rewards(config, rows, heldout)
        if not config.actor_rollout_ref.model.path.startswith(WARM_START_PREFIX):
            # One prompt shows whether template and tokenizer fit, however long it is; the trainer reads them all.
            PromptSource(rows[:1], config.tokenizer(), 0)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.steps(len(rows)) < 1:
        raise ConfigError(
            f"data.train_files give {len(rows)} prompts, in all epochs fewer than data.train_batch_size="
            f"{config.prompts_per_step}; lower it, or raise data.train_max_samples"
        )
    refuse({"few_heldout": 0 < len(heldout) < config.sampling_ranks}, c=config, count=len(heldout))
    return len(rows)


def _check_models(config: VerlPPOConfig) -> None:
    policy, critic, reward = config.actor_rollout_ref.model.path, config.critic.model.path, config.reward_model.model
    asked = {"actor_rollout_ref.model.path": policy}
    asked |= {"critic.model.path": critic} if config.needs_critic and critic else {}
    asked |= {"reward_model.model.path": reward.path or ""} if config.needs_reward_model else {}
    for option, path in asked.items():
        try:
            if path.startswith(WARM_START_PREFIX) and option != "reward_model.model.path":
                get_task(path.removeprefix(WARM_START_PREFIX))
            elif (labels := find_model(path).num_labels) != 1 and option == "reward_model.model.path":
                raise ValueError(f"it has {labels} labels; a reward model has one (num_labels=1)")
        except ValueError as error:
            raise ConfigError(f"{option}={path}: {error}") from error
    if not config.needs_reward_model or policy.startswith(WARM_START_PREFIX):
        return
    if not same_vocabulary(config.tokenizer(), load_tokenizer(reward.path or "", pad_with_end=True)):
        raise ConfigError(
            f"reward_model.model.path={reward.path} has another vocabulary than the policy, {policy}, so it would read "
            "other words; use one of the same family, or a function that asks a server (custom_reward_function.path)"
        )
