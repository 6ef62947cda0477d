"""Checks of prompts, rewards and agents before any process starts, and the values of `auto` options of policy runs.

Nothing here imports torch, unless a model other than a demonstration's has to be read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from components.models.attention import choose_attention
from components.models.sources import is_made, made_model
from components.registry import find, load
from training.launch.model_checks import CHECK, check_model, check_vocabulary
from training.options.data_options import DataOptions
from training.options.evaluation_options import EvaluationOptions
from training.options.model_options import ModelOptions
from training.options.run_options import RunOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agents.options import AgentOptions
    from components.rewards.base import RewardSettings

C = TypeVar("C", bound=RunOptions)

CHECKED_ROWS = 10_000
"""Maximum number of prompts that are checked before anything starts. The trainer reads the others."""


def resolved(config: C, gpus: int) -> C:
    """Resolve the automatic values of a configuration: precision, attention, engine and numbers of workers.

    Args:
        config: options with the groups model, rollout, train, evaluation and placement.
        gpus: number of GPUs of each machine.

    Raises:
        ValueError: the machine lacks something that the configuration requires.
    """
    options: Any = config
    temperature = options.evaluation.temperature
    rank = options.train.lora_rank
    # The other choices follow from the engine: the number of engines, sleeping, and the carrier of the weights.
    rollout, _ = options.rollout.chosen(gpus, options.model.path, temperature, lora_rank=rank)
    rollout = replace(rollout, weight_sync=options.weight_sync(gpus)[0])
    # Roles that hold the policy: the actor, the engines, and the reference if there is one.
    groups = 2 + int(options.has_reference_role)
    placement = options.placement.with_sleep(gpus, rollout.engine).resolved(gpus, groups, rollout.tensor_parallel)
    model = replace(options.model, attn_implementation=choose_attention(options.model.attn_implementation, gpus))
    return replace(options, model=model, rollout=rollout, placement=placement, train=options.train.resolved(gpus))


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
    """Check that model, prompts and reward exist and fit together, before anything starts.

    Args:
        model: options of the policy's model. A model that is created later is not checked.
        data: options of the prompts.
        evaluation: options of the held-out prompts.
        reward: source of rewards for `open_reward`, or None if the environment of an agent gives them.
        seed: seed of the run.
        settings: settings of reward code.
        max_new_tokens: see `check_encoding`.
        notes: list that notes for the user are appended to: those of `try_rewards` and `try_agent`, and the number of
            rows that max_samples leaves out.
        encodes: True to tokenize the prompts. False for a plan without the model.
        calls_servers: see `try_rewards`.
        agent: options of episodes. The agent that they name is tried.

    Returns:
        Number of rows to train on. Rows after the first CHECKED_ROWS count even if they are too long.

    Raises:
        ValueError: something is missing or does not fit. The message says what to set.
    """
    from components.data.values import check_one_kind, label_text
    from components.rewards.base import check_reward, is_reward_file, reward_parts
    from components.rewards.scorers import get_scorer, scorer_names

    if encodes:
        check_model(model.path)
    parts = set[str]()
    if reward is not None:
        check_reward(reward)
        parts = {part for _, part in reward_parts(reward)}
    rows = data.rows(seed, notes)
    heldout = evaluation.rows(data, notes)
    for scorer in parts.intersection(scorer_names()):
        # A scorer that cannot read a label indicates a wrong label_key. One row is enough to find that.
        for row in (rows[0], *heldout[:1]):
            get_scorer(scorer)("", label_text(row["label"]))
    # A function of the user gets one type of prompt, text or messages, so the rows must not mix both.
    if any(map(is_reward_file, parts)):
        for path, part_rows in ((data.path, rows), (evaluation.path, heldout)):
            check_one_kind((row["input"] for row in part_rows), str(path))
    too_long = 0
    if encodes:
        too_long = check_encoding(model, data, rows, seed, max_new_tokens)
        check_heldout(model, data, heldout, seed, max_new_tokens)
    tried = {"the data": rows, "the held-out data": heldout}
    trial_notes = list[str]()
    if reward is not None and reward not in scorer_names():
        try_rewards = load("reward trial", "rewards", f"reward.source={reward}")
        trial_notes += try_rewards(reward, "reward.source", tried, settings, calls_servers=calls_servers)
    if agent is not None and agent.func_path:
        try_agent = load("agents", "trial")
        trial_notes += try_agent(agent, data, tried, partial(data_tokenizer, model) if encodes else None)
    if notes is not None:
        notes += trial_notes
    return len(rows) - too_long


def check_heldout(
    model: ModelOptions, data: DataOptions, rows: list[dict[str, Any]], seed: int, max_new_tokens: int | None
) -> None:
    """Check held-out prompts with `check_encoding`. There may be none.

    Raises:
        ValueError: they do not fit the model. The message begins with the option evaluation.path.
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
    """Check that model, template, tokenizer and lengths fit together, with the first CHECKED_ROWS rows.

    Args:
        model: options of the policy's model.
        data: options of the prompts.
        rows: rows of the prompts.
        seed: seed of the run.
        max_new_tokens: maximum number of tokens after a prompt, or None for an agent, whose lengths are not known yet.

    Returns:
        Number of these rows that are left out because they are too long.

    Raises:
        ValueError: they do not fit together, or all prompts are too long.
    """
    rows = rows[:CHECKED_ROWS]
    if is_made(model.path):  # it may not have been created yet
        if max(len(str(row["input"])) for row in rows) <= data.max_prompt_tokens:
            # A token has at least one character, so no prompt is too long. The tokenizer would take seconds to import.
            return 0
        return data.source(rows, data_tokenizer(model), seed).too_long
    tokenizer = data_tokenizer(model)
    check_vocabulary(tokenizer, model)
    source = data.source(rows, tokenizer, seed)
    # The lengths of an agent's episodes are not known before they are played.
    if max_new_tokens and (check := find(CHECK, "positions")):
        check(model, source.longest_kept, max_new_tokens)
    return source.too_long


def data_tokenizer(model: ModelOptions) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the prompts, also for a model that a plug-in has not created yet."""
    return (made_model(model.path) or model).tokenizer()
