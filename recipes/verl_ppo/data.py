"""The prompts: rows in verl's format, what is handed out of them, and the checks of a run's inputs. Nothing is imported
here that needs torch, before a model of the user's own has to be looked at.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agents.loading import check_agent
from components.data.prompts import PromptSource
from components.data.text import load_tokenizer, same_vocabulary
from components.data.verl_rows import load_verl_rows
from components.hub import find_model
from training.inputs import check_model
from training.schema import ConfigError
from training.warm_start import WARM_START_PREFIX

from .config import VerlPPOConfig
from .keys import refuse
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
    limit = own.val_max_samples if heldout else own.train_max_samples
    return load_verl_rows(
        own.val_files if heldout else own.train_files,
        prompt_key=own.prompt_key,
        source_key=own.reward_fn_key,
        # A reward model reads the responses alone, and an agent's environment has rewards of its own.
        needs_truth=not (config.reward_model.enable or config.agent.func_path),
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
    info: Callable[[str], None] = print,
) -> PromptSource:
    """Rows as token ids; says how many are longer than data.max_prompt_length, and what becomes of them.

    Raises:
        ValueError: one is, and data.truncation=error.
    """
    own = config.data
    overlong = "leave_out" if own.filter_overlong_prompts else own.truncation
    source = PromptSource(
        rows,
        tokenizer,
        data_seed(config),
        shuffle=own.shuffle and not heldout,
        max_prompt_tokens=own.max_prompt_length,
        overlong="left" if overlong == "error" else overlong,  # what is refused is counted as what would be cut
    )
    what = "held-out prompts" if heldout else "prompts"
    longer = f"{what} of more than data.max_prompt_length={own.max_prompt_length} tokens"
    found = f"{source.cut} of {len(rows)} {longer}"
    row, length = source.longest
    refuse({"overlong": overlong == "error" and source.cut}, found=found, row=row, length=length)
    if heldout:
        refuse({"few_heldout": len(source) < config.sampling_ranks}, c=config, count=len(source))
    elif tokenizer.pad_token == tokenizer.eos_token:
        info(f"the tokenizer's end token {tokenizer.eos_token!r} pads too")
    if source.too_long:
        info(f"{source.too_long} {longer} are left out")
    if source.cut:
        info(f"{source.cut} {longer} are cut (data.truncation={own.truncation})")
    return source


def check_inputs(config: VerlPPOConfig) -> int:
    """See that models, data and reward can be there and fit together, before any process starts; how many prompts there
    are.

    Raises:
        ConfigError: one of them cannot; the message says what to set.
    """
    policy = config.actor_rollout_ref.model.path
    try:
        check_model(policy, "actor_rollout_ref.model.path")
        if config.needs_critic and config.critic.model.path:
            check_model(config.critic.model.path, "critic.model.path")
        if config.reward_model.enable:
            _check_reward_model(config)
        if config.agent.func_path is not None:
            check_agent(config.agent.func_path)
        rows = read_rows(config)
        heldout = read_rows(config, heldout=True)
        check_rewards(config, rows, heldout)
        if not policy.startswith(WARM_START_PREFIX):
            # One prompt shows whether template and tokenizer fit, however long it is; the trainer reads them all.
            PromptSource(rows[:1], config.tokenizer(), 0)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    few_heldout = 0 < len(heldout) < config.sampling_ranks
    refuse({"few_prompts": config.steps(len(rows)) < 1}, c=config, count=len(rows))
    refuse({"few_heldout": few_heldout}, c=config, count=len(heldout))
    return len(rows)


def _check_reward_model(config: VerlPPOConfig) -> None:
    policy, path = config.actor_rollout_ref.model.path, config.reward_model.model.path or ""
    check_model(path, "reward_model.model.path")
    labels = find_model(path).num_labels
    refuse({"labels": labels != 1}, path=path, labels=labels)
    if not policy.startswith(WARM_START_PREFIX):
        reads_others = not same_vocabulary(config.tokenizer(), load_tokenizer(path, pad_with_end=True))
        refuse({"vocabulary": reads_others}, path=path, policy=policy)
