"""Checks of prompts, rewards and agents before any process starts, and the values of `auto` options of a run with
rollouts. Nothing here needs torch before a model of the user's own has to be read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from components.models.attention import choose_attention
from components.models.sources import is_made, made_model
from components.net.hub import find_model
from components.registry import load
from components.train.config import choose_precision
from training.launch.model_checks import check_model, check_vocabulary
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
    train = replace(own.train, precision=choose_precision(own.train.precision, gpus))
    model = replace(own.model, attn_implementation=choose_attention(own.model.attn_implementation, gpus))
    return replace(own, model=model, rollout=rollout, placement=placement, train=train)


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
    if reward is not None and reward not in scorer_names():
        try_rewards = load("reward trial", "rewards", f"reward.source={reward}")
        found += try_rewards(reward, "reward.source", tried, settings, calls_servers=calls_servers)
    if agent is not None and agent.func_path:
        try_agent = load("agents", "trial")
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
