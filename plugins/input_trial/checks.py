"""Checks of labels, template, tokenizer, reward and keys, before any process of a rehearsal starts."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.data.chat import render_conversation
from components.data.text import render_prompt, same_vocabulary
from components.data.values import label_text
from components.models.loading import without_progress_bars
from components.net.hub import first_line
from components.rewards.opening import open_reward
from training.run.prompts import unused_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rows = Sequence[Mapping[str, Any]]
Verdict = tuple[str, str]
"""A verdict, and a description. An empty description is not shown."""

PASSED = "ok"
DOUBTFUL = "look"
UNTRIED = "-"
"""Verdicts of a check that finds no fault."""

FIRST = 8
"""Number of rows whose prompts are rendered, and whose labels are scored."""
SLOW_S = 10.0
"""Seconds of rewards of a full step above which the reward is reported as slow."""
TOO_SLOW_S = 120.0
"""Seconds of rewards of a full step above which the check fails."""
SINGLE_S = 0.5
"""Seconds of the reward of one response above which two rows are scored instead of FIRST."""
SPARE_SHARE = 0.1
"""Share of embeddings without a token above which the tokenizer may be another model's."""
_KEY = re.compile(r"[A-Za-z0-9_-]{40,}")
"""Form of a key of W&B."""


def check_tokenizer(config: Any, full_path: str, tokenizer: PreTrainedTokenizerBase) -> Verdict:
    """Compare the tokenizer with the embedding and the end tokens of the model.

    Args:
        config: options with the small model, whose vocabulary is that of the large one.
        full_path: path of the large model.
        tokenizer: tokenizer of the run.
    """
    from transformers import AutoConfig, AutoTokenizer

    settings = AutoConfig.from_pretrained(config.model.path).get_text_config()
    rows = int(settings.vocab_size)
    tokens = len(tokenizer)
    ends = [settings.eos_token_id]
    if isinstance(settings.eos_token_id, list):
        ends = settings.eos_token_id
    lost = [end for end in ends if end is not None and not 0 <= end < tokens]
    if lost:
        raise ValueError(
            f"config.json names the end token {lost[0]}, but the tokenizer has {tokens} tokens; it belongs to another "
            "model"
        )
    if config.model.tokenizer_path:
        original = AutoTokenizer.from_pretrained(full_path)
        if not same_vocabulary(tokenizer, original):
            raise ValueError(
                f"model.tokenizer_path={config.model.tokenizer_path} has another vocabulary than {full_path}: {tokens} "
                f"and {len(original)} tokens, or other ids; leave it out"
            )
    text = f"{tokens:,} tokens for {rows:,} embeddings, end token {tokenizer.eos_token!r}"
    if rows - tokens > SPARE_SHARE * rows:
        return DOUBTFUL, f"{text}: many have no token; is it the tokenizer of this model?"
    return PASSED, text


def check_template(config: Any, rows: Rows, tokenizer: PreTrainedTokenizerBase) -> Verdict:
    """Render the first rows, and look for the content of every message and for the answer in the text."""
    templated = 0
    for number, row in enumerate(rows[:FIRST]):
        for prompt, answer in _conversations(row):
            if isinstance(prompt, str) and not config.data.apply_chat_template:
                continue
            templated += 1
            messages = [{"role": "user", "content": prompt}]
            if not isinstance(prompt, str):
                messages = [dict(message) for message in prompt]
            rendered = render_prompt(messages, tokenizer)
            for message in messages:
                _find(rendered, message.get("content"), f"row {number}: the template drops the {message['role']}'s")
            if answer:
                whole = render_conversation([*messages, {"role": "assistant", "content": answer}], tokenizer)
                # The prompt may contain the text of the answer too, such as a number.
                added = whole if whole.count(answer.strip()) > rendered.count(answer.strip()) else ""
                _find(added, answer, f"row {number}: the template drops the response: the assistant's")
    if templated:
        return PASSED, f"the first {templated} conversations keep every message and the response"
    warning = "prompt" in rows[0] or unused_template(config.data, rows[0].get("input"), tokenizer)
    if isinstance(warning, str):
        return DOUBTFUL, warning.removeprefix("warning: ")
    return PASSED, "prompts are plain text, without a chat template"


def _conversations(row: Mapping[str, Any]) -> list[tuple[Any, str]]:
    """Return the pairs of a prompt and its answer in a row of prompts, demonstrations or preferences."""
    if "input" in row:
        return [(row["input"], label_text(row["label"]))]
    if "messages" in row:
        messages = list(row["messages"])
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant" and place]
        return [(messages[:place], str(messages[place].get("content") or "")) for place in places[-1:]]
    answers = [row[name] for name in ("response", "chosen", "rejected") if isinstance(row.get(name), str)]
    return [(row["prompt"], answer) for answer in answers if row.get("prompt")]


def _find(rendered: str, content: Any, problem: str) -> None:
    """Raise ValueError if a rendered conversation lacks the text of a message."""
    if isinstance(content, str) and (text := content.strip()) and text not in rendered:
        raise ValueError(f"{problem} text {text[:60]!r} is missing; set model.chat_template")


def check_labels(config: Any, rows: Rows) -> Verdict:
    """Raise ValueError for a row whose label is None, if the data have labels."""
    empty = [number for number, row in enumerate(rows) if "input" in row and row["label"] is None]
    if empty and len(empty) < len(rows):
        raise ValueError(
            f"row {empty[0]}: the label is None ({len(empty)} of {len(rows)} rows, data.label_key="
            f"{config.data.label_key}); remove these rows"
        )
    return PASSED, ""


def check_reward(config: Any, rows: Rows, step_size: int) -> Verdict:
    """Score the labels of the first rows as responses, and compute the time of a full step from their time.

    Args:
        config: options of the run.
        rows: rows of the prompts.
        step_size: number of responses of a full step.
    """
    source = config.reward_source
    rows = rows[:FIRST]
    labels = [row["label"] for row in rows]
    prompts = [str(row["input"]) for row in rows]
    answers = [label_text(label) for label in labels]
    queries = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    others = [
        {"data_source": row.get("datasource", ""), "columns": row.get("extra_info") or {}, "completion_ids": [0]}
        for row in rows
    ]
    settings = replace(config.reward.settings(), workers=1, max_failed_share=1.0)
    with open_reward(source, settings) as reward:

        def score(count: int) -> tuple[float, Any]:
            began = time.monotonic()
            columns = (queries[:count], prompts[:count], labels[:count])
            output = reward(*columns, responses=answers[:count], rows=others[:count])
            return time.monotonic() - began, output

        # The first call starts the process of the reward, which is no part of the time of a response.
        first_s, _ = score(1)
        single_s = first_s if first_s > SLOW_S else score(1)[0]
        # Slow rewards are measured with fewer rows, so that a rehearsal stays short.
        if single_s > SINGLE_S:
            rows = rows[:2]
        seconds, output = score(len(rows))
    if output.failures:
        number, problem = next(iter(output.failures.items()))
        raise ValueError(f"{source}: row {number}, its label as the response: {problem}")
    each_s = seconds / len(rows)
    total_s = each_s * step_size / config.reward.workers
    rewards = output.reward_B.tolist()
    text = f"labels as responses earn {min(rewards):g} to {max(rewards):g}; {1000 * each_s:.3g} ms a response"
    step = f"{step_size} responses take {total_s:,.0f} s per step with reward.workers={config.reward.workers}"
    if total_s > TOO_SLOW_S:
        raise ValueError(f"{source} is too slow: {each_s:.1f} s a response; {step}; raise reward.workers")
    if total_s > SLOW_S:
        return DOUBTFUL, f"{text}; {step}; raise reward.workers"
    if max(rewards) <= 0:
        return DOUBTFUL, f"{text}: no label is a correct response; compare the form that the reward reads"
    return PASSED, text


def check_trackers(config: Any) -> Verdict:
    """Check the form of the key of W&B. Whether the server accepts it is only known with a network."""
    log = config.log
    if not (log.wandb or log.wandb_key):
        return PASSED, ""
    key = log.wandb_key or os.environ.get("WANDB_API_KEY", "")
    if key and not _KEY.fullmatch(key):
        raise ValueError(
            f"the key of W&B has {len(key)} characters; a key has 40 or more letters and digits: copy it from "
            "wandb.ai/authorize"
        )
    if not key:
        return UNTRIED, "no key here; the run writes offline"
    return UNTRIED, "its form is right; W&B is not asked"


def exported(folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> Verdict:
    """Load an exported model with `from_pretrained`. Return the verdict.

    Raises:
        ValueError: there is no export, or it cannot be loaded.
    """
    import transformers

    if (folder / "adapter_config.json").is_file():
        import peft

        peft.PeftConfig.from_pretrained(str(folder))
        return PASSED, f"adapters in {folder.name}/ are read by peft"
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0])
        with without_progress_bars():
            model = kind.from_pretrained(folder)
        loaded = transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise ValueError(f"{folder} cannot be loaded by from_pretrained: {first_line(error)}") from error
    if tokenizer is not None and not same_vocabulary(loaded, tokenizer):
        raise ValueError(f"{folder} has another vocabulary than the tokenizer of the run")
    return PASSED, f"{type(model).__name__} with its tokenizer, loaded by from_pretrained"
