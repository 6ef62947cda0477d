"""What a run starts from: what is left to the machine is filled in; models, data and rewards are looked at before any
process starts. Nothing here needs torch before a model of the user's own has to be read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from components.generate.choice import choose_attention
from components.models.disk.tensor_header import check_weight_files
from components.models.sources import is_made, made_model
from components.net.hub import WEIGHTS, ModelNotFound, cached_folder, find_model
from training.options.data_options import DataOptions
from training.options.evaluation_options import EvaluationOptions
from training.options.model_options import ModelOptions
from training.options.run_options import RunOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agents.options import AgentOptions
    from components.data.prompts import PromptSource
    from components.rewards.base import RewardSettings

C = TypeVar("C", bound=RunOptions)

CHECKED_ROWS = 10_000
"""So many prompts are read before anything starts; of more data, the trainer reads the others."""


def resolved(config: C, gpus: int) -> C:
    """A configuration of these groups with everything filled in that was left to the machine: precision, attention,
    who samples, and how many workers a role has.

    Args:
        config: with the groups model, rollout, train, evaluation and placement, and the number of `groups` that hold
            the policy.
        gpus: of each machine.

    Raises:
        ValueError: it asks for what the machine does not have.
    """
    own: Any = config
    temperature, rank = own.evaluation.temperature, own.train.lora_rank
    rollout, _ = own.rollout.chosen(gpus, own.model.path, temperature, lora_rank=rank)
    rollout = replace(rollout, weight_sync=own.weight_sync(gpus)[0])
    groups = 3 if own.has_reference_role else 2
    placement = own.placement.with_sleep(gpus, rollout.engine).resolved(gpus, groups, rollout.tensor_parallel)
    precision = own.train.precision
    train = replace(own.train, precision=("bf16" if gpus else "fp32") if precision == "auto" else precision)
    model = replace(own.model, attn_implementation=choose_attention(own.model.attn_implementation, gpus))
    return replace(own, model=model, rollout=rollout, placement=placement, train=train)


def check_model(path: str, option: str = "model.path") -> None:
    """See that the model that an option names can be there, before anything starts.

    Raises:
        ValueError: it cannot; the message says what to set.
    """
    try:
        if (made := made_model(path)) is not None:
            made.check()
        else:
            find_model(path)
            folder = Path(path).expanduser()
            check_weight_files(folder if folder.is_dir() else cached_folder(path))
    except ValueError as error:
        raise type(error)(f"{option}={path}: {error}") from error


def absent_models(models: Mapping[str, str]) -> dict[str, str]:
    """Return the models that this machine lacks, by option, with the reason. A plan needs no more than a config.json,
    which is fetched into the cache of the hub.

    Args:
        models: path of each model, by option.
    """
    absent = dict[str, str]()
    for option, path in models.items():
        if is_made(path):
            continue
        folder = Path(path).expanduser()
        try:
            find_model(path)
        except ModelNotFound as error:
            absent[option] = str(error)
        except ValueError:
            continue  # the checks before a run report it
        if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
            absent[option] = "the folder has no weights"
    return absent


def check_reward_model(path: str, option: str, policy: ModelOptions) -> None:
    """See that the reward model that an option names can be there, has one label, and reads the policy's tokens.

    Raises:
        ValueError: it cannot, or does not; the message says what to set.
    """
    from components.data.text import load_tokenizer, same_vocabulary

    check_model(path, option)
    if is_made(path):
        return
    labels = find_model(path).num_labels
    if labels != 1:
        raise ValueError(f"{option}={path}: it has {labels} labels; a reward model has one (num_labels=1)")
    if is_made(policy.path):
        return
    if not same_vocabulary(policy.tokenizer(), load_tokenizer(path, pad_token=policy.pad_token, pad_with_end=True)):
        raise ValueError(
            f"{option}={path} has another vocabulary than model.path={policy.path}, so it would read other words; use "
            "one of the same family, or serve it, and give its URL as reward.source"
        )
    check_reader(path, option, policy)


def check_reader(path: str, option: str, policy: ModelOptions) -> None:
    """Check that a model that an option names can be there, and has an embedding for each token of the policy.

    Raises:
        ValueError: it cannot, or has not; the message says what to set.
    """
    check_model(path, option)
    if is_made(path) or is_made(policy.path):
        return
    rows = getattr(find_model(path).get_text_config(), "vocab_size", sys.maxsize)
    policy_rows = getattr(find_model(policy.path).get_text_config(), "vocab_size", sys.maxsize)
    # Rows beyond the tokenizer's fill an embedding up, and no policy learns to draw them.
    tokens = min(len(policy.tokenizer()), policy_rows)
    if tokens > rows:
        raise ValueError(
            f"{option}={path} has {rows} rows in its embedding (vocab_size), and model.path={policy.path} writes "
            f"{tokens} tokens; use a model with as many rows"
        )


def check_prompts(
    model: ModelOptions,
    data: DataOptions,
    evaluation: EvaluationOptions,
    reward: str | None,
    seed: int,
    settings: RewardSettings | None = None,
    max_new_tokens: int | None = None,
    notes: list[str] | None = None,
    *,
    encodes: bool = True,
    calls_servers: bool = True,
    agent: AgentOptions | None = None,
) -> int:
    """See that model, prompts and reward can be there and fit together, before anything starts.

    Args:
        model: of the policy; one that is still to be made is not looked at.
        data: of the prompts.
        evaluation: of the held-out prompts.
        reward: what `open_reward` is to open; None: the environment of an agent rewards.
        seed: of the run.
        settings: of reward code.
        max_new_tokens: see `check_encoding`.
        notes: those of `try_rewards` and `try_agent` are appended, and how many rows max_samples leaves out.
        encodes: read the prompts with the policy's tokenizer; False where a plan is made without the model.
        calls_servers: see `try_rewards`.
        agent: options of episodes; the agent that they name is tried.

    Returns:
        How many rows there are to train on; of those beyond CHECKED_ROWS, the too long ones included.

    Raises:
        ValueError: they cannot, or do not; the message says what to set.
    """
    from components.data.cells import check_one_kind, label_text
    from components.rewards.base import check_reward, is_reward_file, reward_parts
    from components.rewards.scorers import get_scorer, scorer_names
    from training.launch.reward_trial import try_rewards

    if encodes:
        check_model(model.path)
    if reward is not None:
        check_reward(reward)
    rows, heldout = data.rows(seed, notes), evaluation.rows(data, notes)
    parts = {part for _, part in reward_parts(reward)} if reward else set[str]()
    for scorer in parts.intersection(scorer_names()):
        # A label that the scorer cannot read is a wrong label_key; one row shows it.
        for row in (rows[0], *heldout[:1]):
            get_scorer(scorer)("", label_text(row["label"]))
    if any(map(is_reward_file, parts)):
        for path, some in ((data.path, rows), (evaluation.path, heldout)):
            check_one_kind((row["input"] for row in some), str(path))
    too_long = 0
    if encodes:
        too_long = check_encoding(model, data, rows, seed, max_new_tokens)
        check_heldout(model, data, heldout, seed, max_new_tokens)
    tried = {"the data": rows, "the held-out data": heldout}
    found = list[str]()
    if reward is not None:
        found += try_rewards(reward, "reward.source", tried, settings, calls_servers=calls_servers)
    if agent is not None and agent.func_path:
        from training.launch.agent_trial import try_agent

        found += try_agent(agent, data, tried, partial(data_tokenizer, model) if encodes else None)
    if notes is not None:
        notes += found
    return len(rows) - too_long


def check_heldout(
    model: ModelOptions,
    data: DataOptions,
    rows: list[dict[str, Any]],
    seed: int,
    max_new_tokens: int | None,
) -> None:
    """Check held-out prompts as `check_encoding` checks those to train on; there may be none.

    Raises:
        ValueError: they do not fit the model; the message begins with their option.
    """
    if not rows:
        return
    try:
        check_encoding(model, data, rows, seed, max_new_tokens)
    except ValueError as error:
        raise ValueError(f"evaluation.path: {error}") from error


def check_encoding(
    model: ModelOptions, data: DataOptions, rows: list[dict[str, Any]], seed: int, max_new_tokens: int | None
) -> int:
    """See that model, template, tokenizer and lengths fit together, as far as the first CHECKED_ROWS rows show it.

    Args:
        model: of the policy.
        data: of the prompts.
        rows: of the prompts.
        seed: of the run.
        max_new_tokens: that may follow a prompt; None: what an agent reads and writes is not known yet.

    Returns:
        How many of these rows are left out, because they are too long.

    Raises:
        ValueError: they do not; or all prompts are too long.
    """
    rows = rows[:CHECKED_ROWS]
    if is_made(model.path):  # perhaps it is still to be made
        if max(len(str(row["input"])) for row in rows) <= data.max_prompt_tokens:
            return 0  # without its tokenizer, which takes seconds to import: a token has a character at least
        return data.source(rows, data_tokenizer(model), seed).too_long
    tokenizer = data_tokenizer(model)
    check_vocabulary(tokenizer, model)
    source = data.source(rows, tokenizer, seed)
    of_model, longest = find_model(model.path).get_text_config(), source.longest_kept
    positions = getattr(of_model, "max_position_embeddings", None)
    if max_new_tokens and positions and longest + max_new_tokens > positions:
        raise ValueError(
            f"model.path={model.path} has {positions} positions; a prompt of {longest} tokens and "
            f"rollout.max_new_tokens={max_new_tokens} are more; lower that, or data.max_prompt_tokens"
        )
    return source.too_long


def data_tokenizer(model: ModelOptions) -> PreTrainedTokenizerBase:
    """Return the tokenizer that prompts are read with, also of a model that a plug-in still has to make."""
    made = made_model(model.path)
    return model.tokenizer() if made is None else made.tokenizer()


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: ModelOptions) -> None:
    """See that a model that is there knows all tokens of the tokenizer that it is to be used with.

    Raises:
        ValueError: it does not.
    """
    embedded = getattr(find_model(model.path).get_text_config(), "vocab_size", sys.maxsize)
    # Tokens that were added later may lie beyond it: no text need hold them.
    if tokenizer.vocab_size > embedded:
        raise ValueError(
            f"the tokenizer of {model.tokenizer_path or model.path} has {tokenizer.vocab_size} tokens, and the "
            f"model of model.path={model.path} knows {embedded}; set model.tokenizer_path to the model's own"
        )


def read_prompts(
    data: DataOptions,
    rows: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    heldout: bool = False,
    info: Callable[[str], None],
) -> PromptSource:
    """Rows as token ids; says how many are longer than they may be."""
    source = data.source(rows, tokenizer, seed, shuffle=not heldout)
    if count := source.too_long or source.cut:
        what = "held-out prompts" if heldout else "prompts"
        done = "left out" if source.too_long else f"cut (data.overlong={data.overlong})"
        info(f"{count} {what} of more than data.max_prompt_tokens={data.max_prompt_tokens} tokens are {done}")
    return source


def describe_prompts(data: DataOptions, source: PromptSource) -> list[str]:
    """Describe what the policy reads: the columns, the first prompt, and prompts that it continues."""
    columns = data.describe_columns(list(map(dict, source.rows)))
    lines = [columns] if columns else []
    lines.append(source.describe_first())
    if source.prefilled:
        lines.append(
            f"{source.prefilled} of {len(source.rows)} prompts end with a message of the assistant, which the policy "
            "continues"
        )
    return lines


def unused_template(data: DataOptions, prompt: Any, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A warning where the tokenizer's chat template would make another text of a prompt, and is not used."""
    from components.data.text import render_prompt

    is_plain = isinstance(prompt, str) and not data.apply_chat_template and data.input_template is None
    if not is_plain or not tokenizer.chat_template:
        return None
    try:
        changes_nothing = render_prompt(prompt, tokenizer, apply_chat_template=True) == prompt
    except ValueError:  # it refuses such a conversation, so it could not be used
        return None
    if changes_nothing:
        return None
    return (
        "warning: the tokenizer has a chat template, and prompts are read as plain text; for an instruct model set "
        "data.apply_chat_template=true"
    )
