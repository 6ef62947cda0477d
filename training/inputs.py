"""What a run starts from: what is left to the machine is filled in; models, data and rewards are looked at before any
process starts. Nothing here needs torch before a model of the user's own has to be read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from components.engines.choice import choose_attention
from components.hub import find_model
from training.options import DataOptions, EvaluationOptions, ModelOptions, RunOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.data.prompts import PromptSource
    from components.data.rewards import RewardSettings

C = TypeVar("C", bound=RunOptions)


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
    rollout, _ = own.rollout.chosen(gpus, own.model.path, own.evaluation.temperature)
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
    from components.data.tasks import get_task
    from training.warm_start import WARM_START_PREFIX

    try:
        if path.startswith(WARM_START_PREFIX):
            get_task(path.removeprefix(WARM_START_PREFIX))
        else:
            find_model(path)
    except ValueError as error:
        raise ValueError(f"{option}={path}: {error}") from error


def check_reward_model(path: str, option: str, policy: ModelOptions) -> None:
    """See that the reward model that an option names can be there, has one label, and reads the policy's tokens.

    Raises:
        ValueError: it cannot, or does not; the message says what to set.
    """
    from components.data.text import load_tokenizer, same_vocabulary
    from training.warm_start import WARM_START_PREFIX

    check_model(path, option)
    if path.startswith(WARM_START_PREFIX):
        return
    labels = find_model(path).num_labels
    if labels != 1:
        raise ValueError(f"{option}={path}: it has {labels} labels; a reward model has one (num_labels=1)")
    if policy.path.startswith(WARM_START_PREFIX):
        return
    if not same_vocabulary(policy.tokenizer(), load_tokenizer(path, pad_token=policy.pad_token, pad_with_end=True)):
        raise ValueError(
            f"{option}={path} has another vocabulary than model.path={policy.path}, so it would read other words; use "
            "one of the same family, or serve it, and give its URL as reward.source"
        )


def check_prompts(
    model: ModelOptions,
    data: DataOptions,
    evaluation: EvaluationOptions,
    reward: str | None,
    seed: int,
    settings: RewardSettings | None = None,
) -> int:
    """See that model, prompts and reward can be there and fit together, before anything starts.

    Args:
        model: of the policy; one that is still to be made is not looked at.
        data: of the prompts.
        evaluation: of the held-out prompts.
        reward: what `open_reward` is to open; None: the environment of an agent rewards.
        seed: of the run.
        settings: of reward code; its functions are called with the first row.

    Returns:
        How many rows there are to train on, the too long ones included.

    Raises:
        ValueError: they cannot, or do not; the message says what to set.
    """
    from components.data.rewards import check_reward, is_reward_file, reward_parts
    from components.data.scorers import get_scorer, scorer_names

    check_model(model.path)
    if reward is not None:
        check_reward(reward)
    rows, heldout = data.rows(seed), evaluation.rows(data)
    parts = {part for _, part in reward_parts(reward)} if reward else set[str]()
    for scorer in parts.intersection(scorer_names()):
        # A label that the scorer cannot read is a wrong label_key; one row shows it.
        for row in (rows[0], *heldout[:1]):
            get_scorer(scorer)("", str(row["label"]))
    check_template(model, data, rows, seed)
    for part in filter(is_reward_file, sorted(parts)):
        try_reward(part, rows[0], settings)
    return len(rows)


def try_reward(part: str, row: Mapping[str, Any], settings: RewardSettings | None = None) -> None:
    """Call a reward function of a file once, in a process of its own, with a row whose label is the response.

    Raises:
        ValueError: it takes what there is not, fails, or returns what is no reward.
    """
    from components.data.reward_workers import WorkerReward
    from components.data.rewards import RewardSettings

    prompt, response = str(row["input"]), str(row["label"])
    about = {"data_source": row["datasource"], "columns": row.get("extra_info") or {}, "completion_ids": [0]}
    one = replace(settings or RewardSettings(), workers=1, max_failed_share=1.0)
    with WorkerReward(part, one, in_sum=True) as function:
        tried = function([prompt + response], [prompt], [row["label"]], responses=[response], rows=[about])
    if tried.failures:
        raise ValueError(
            f"reward.source={part}: called with the first row of the data, its label as the response, "
            f"{function.source} fails: {tried.failures[0]}"
        )


def check_template(model: ModelOptions, data: DataOptions, rows: list[dict[str, Any]], seed: int) -> None:
    """See that model, template and tokenizer fit together; a model that is still to be made is not looked at.

    Raises:
        ValueError: they do not.
    """
    from training.warm_start import WARM_START_PREFIX

    if not model.path.startswith(WARM_START_PREFIX):
        # One prompt shows it, however long it is; the trainer reads them all, and the long ones.
        tokenizer = model.tokenizer()
        embedded = getattr(find_model(model.path).get_text_config(), "vocab_size", sys.maxsize)
        # Tokens that were added later may lie beyond it: no text need hold them.
        if tokenizer.vocab_size > embedded:
            raise ValueError(
                f"the tokenizer of {model.tokenizer_path or model.path} has {tokenizer.vocab_size} tokens, and the "
                f"model of model.path={model.path} knows {embedded}; set model.tokenizer_path to the model's own"
            )
        replace(data, max_prompt_tokens=sys.maxsize).source(rows[:1], tokenizer, seed)


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
