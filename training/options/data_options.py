"""Options of the prompts that a policy is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from components.data.messages import CHAT
from components.data.mixture import source_names
from components.data.sources import READER, check_sources, is_drawn
from components.ranges import Count
from components.registry import load, require
from training.options.schema import Options, column_names, errors_of, limit_note, of_plugin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.data.prompts import PromptSource


@dataclass(kw_only=True)
class DataOptions(Options, group="data"):
    """The prompts to train on."""

    path: str = ""
    """Training data: a json, jsonl, csv, parquet or arrow file, a folder of `save_to_disk` or of such files, a hub
    name, `task:<name>` for a generated task, or `reasoning_gym:<task>`. Separate several sources with commas."""
    probs: str | None = None
    """Mixture probabilities, one per source, such as `0.7,0.3`. By default the sources are concatenated."""
    split: str = "train"
    """Split of a hub name or folder."""
    prompt_key: str = "input"
    """Column of the prompt: text, or a list of chat messages. Generated tasks have a column of their own."""
    label_key: str | None = None
    """Column of the label that is passed to the reward. `a.b` is the field b of the column a. No label by default."""
    apply_chat_template: bool = False
    """Wrap each prompt as a user message of the tokenizer's chat template. Chat messages always use the template."""
    input_template: str | None = None
    """Text around each prompt, with `{}` as placeholder of the prompt. By default the prompt is used as it is."""
    ignored_columns: str | None = None
    """Comma-separated columns to hide from the policy although their names have a conventional meaning, such as
    `tools`, `system` or `images`. By default such columns are used, or their rows rejected. Rewards still receive
    them."""
    max_samples: Count | None = None
    """Maximum number of prompts, taken from the start. Default: all prompts, or 10,000 of a generated task, which is
    unlimited."""
    max_prompt_tokens: Count = 1024
    """Maximum number of tokens of a prompt."""
    overlong: Literal["leave_out", "error", "left", "right", "middle"] = "leave_out"
    """Treatment of prompts above max_prompt_tokens. `leave_out` excludes and counts them. `error` stops the run.
    `left`, `right` and `middle` cut out that part of the prompt."""
    shuffle: bool = True
    """Shuffle the prompts in each epoch."""
    epochs: Count = 1
    """Number of passes over the prompts, each in a different order if shuffle is set."""

    curriculum: Literal["none", "variance", "pools"] = of_plugin("curriculum", "none")
    """Selection of prompts by their mean score so far, p. `none`: every prompt once per epoch. `variance`: at random,
    in proportion to p (1 - p). `pools`: fixed shares of easy, middle and hard prompts; see curriculum.shares."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        template = self.input_template
        if template is not None and template.count("{}") != 1:
            yield f"data.input_template={template!r} must contain {{}} exactly once, as placeholder of the prompt"
        if template is not None and self.apply_chat_template:
            yield "data.apply_chat_template and data.input_template exclude each other; unset one of them"
        # Named here, in one line, and not for the first row after the plan was shown.
        if self.apply_chat_template:
            yield from errors_of("", require, CHAT, "text", "data.apply_chat_template=true")
        yield from errors_of(f"data.path={self.path}: ", check_sources, self.path)

    def rows(self, seed: int, notes: list[str] | None = None) -> list[dict[str, Any]]:
        """Return the rows of prompts and labels.

        Args:
            seed: random seed of a generated task and of a mixture.
            notes: receives the number of prompts that max_samples excludes.
        """
        from components.data.prompts import load_rows

        return load_rows(
            self.path,
            self.prompt_key,
            self.label_key,
            split=self.split,
            max_rows=self.max_samples,
            seed=seed,
            probs=self.probs,
            note=limit_note(notes, "data.max_samples"),
            ignored=column_names(self.ignored_columns),
        )

    def describe_columns(self, rows: list[dict[str, Any]]) -> str | None:
        """Describe the columns of the rows that are used, or return None if all sources are generated tasks."""
        # Generated tasks have columns of their own, which the user did not choose.
        if all(map(is_drawn, source_names(self.path))):
            return None
        return load(READER, "columns", f"data.path={self.path}")(rows, self.used_columns)

    @property
    def used_columns(self) -> list[str]:
        """Columns named by the options."""
        return [key for key in (self.prompt_key, self.label_key) if key is not None]

    def source(
        self, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, seed: int, shuffle: bool = True
    ) -> PromptSource:
        """Return the rows as token ids, shuffled by the seed, without prompts that are too long.

        Raises:
            ValueError: a prompt is too long and `overlong` is "error".
        """
        from components.data.prompts import PromptSource

        source = PromptSource(
            rows,
            tokenizer,
            seed,
            shuffle=shuffle and self.shuffle,
            apply_chat_template=self.apply_chat_template,
            input_template=self.input_template,
            max_prompt_tokens=self.max_prompt_tokens,
            # "error" also needs the number of long prompts and the longest one, which any cut counts.
            overlong="left" if self.overlong == "error" else self.overlong,
        )
        if self.overlong == "error" and source.cut:
            row, length = source.longest
            raise ValueError(
                f"{source.cut} of {len(rows)} prompts have more than data.max_prompt_tokens={self.max_prompt_tokens} "
                f"tokens, the longest {length} (row {row}); raise it, or set data.overlong to leave_out, left, right "
                "or middle"
            )
        return source
