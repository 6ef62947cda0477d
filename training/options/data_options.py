"""Options of the prompts that a policy is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from components.data.columns import column_names
from components.data.mixture import source_names
from components.data.sources import check_sources, is_drawn
from components.ranges import Count
from training.options.schema import Options, errors_of, limit_note

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.data.prompts import PromptSource


@dataclass(kw_only=True)
class DataOptions(Options, group="data"):
    """The prompts to train on."""

    path: str = ""
    """A json, jsonl, csv, parquet or arrow file, a folder of `save_to_disk` or with such files, a hub name,
    `task:<name>` for a generated task, or `reasoning_gym:<task>`; several with commas between."""
    probs: str | None = None
    """Shares of a mixture, one per source, as `0.7,0.3`. Default: all of one source, then all of the next."""
    split: str = "train"
    """Which split of a hub name or folder."""
    prompt_key: str = "input"
    """Column of the prompt: text, or a list of chat messages. Generated tasks bring their own."""
    label_key: str | None = None
    """Column of the label that the reward sees; `a.b` is the field b of the column a."""
    apply_chat_template: bool = False
    """Wrap each prompt as a user message of the tokenizer's chat template. Chat messages always go through it."""
    input_template: str | None = None
    """Text around each prompt, with `{}` in its place."""
    ignored_columns: str | None = None
    """Columns, with commas between, that the policy is not to read although their names have a well-known meaning, such
    as `tools`, `system` or `images`; without it they are used, or their rows refused. Rewards are given them."""
    max_samples: Count | None = None
    """Use at most this many prompts. Default: all; of a generated task, which has no end, 10,000."""
    max_prompt_tokens: Count = 1024
    """Tokens of a prompt, at most."""
    overlong: Literal["leave_out", "error", "left", "right", "middle"] = "leave_out"
    """What becomes of longer prompts: they are left out and counted, are an error, or the part is named that is cut
    out."""
    shuffle: bool = True
    """Go through the prompts in another order in each epoch."""
    epochs: Count = 1
    """How often the prompts are gone through, each time in another order."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        template = self.input_template
        if template is not None and template.count("{}") != 1:
            yield f"data.input_template={template!r} must hold {{}} once, where the prompt goes"
        if template is not None and self.apply_chat_template:
            yield "data.apply_chat_template and data.input_template exclude each other; unset one of them"
        yield from errors_of(f"data.path={self.path}: ", check_sources, self.path)

    def rows(self, seed: int, notes: list[str] | None = None) -> list[dict[str, Any]]:
        """The prompts and labels; `seed` draws those of a generated task. `notes` gets how many max_samples leaves
        out.
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
        """Describe which columns of rows are used; None for generated tasks alone, which have none to choose."""
        from components.data.prompt_rows import describe_columns

        if all(map(is_drawn, source_names(self.path))):
            return None
        return describe_columns(rows, self.used_columns)

    @property
    def used_columns(self) -> list[str]:
        """Columns that the options name."""
        return [key for key in (self.prompt_key, self.label_key) if key is not None]

    def source(
        self, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, seed: int, shuffle: bool = True
    ) -> PromptSource:
        """Rows as token ids, in an order that follows from the seed, without those that are too long."""
        from components.data.prompts import PromptSource

        found = PromptSource(
            rows,
            tokenizer,
            seed,
            shuffle=shuffle and self.shuffle,
            apply_chat_template=self.apply_chat_template,
            input_template=self.input_template,
            max_prompt_tokens=self.max_prompt_tokens,
            overlong="left" if self.overlong == "error" else self.overlong,
        )
        if self.overlong == "error" and found.cut:
            row, length = found.longest
            raise ValueError(
                f"{found.cut} of {len(rows)} prompts have more than data.max_prompt_tokens={self.max_prompt_tokens} "
                f"tokens, the longest {length} (row {row}); raise it, or set data.overlong to leave_out, left, right "
                "or middle"
            )
        return found
