"""Options shared by recipes that learn from pairs of responses. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from components.data.mixture import Note
from components.data.sources import is_drawn
from components.ranges import Count
from training.options.schema import column_names, without_effect
from training.options.supervised_options import ExampleOptions, HeldOutOptions, Rows, SupervisedOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.data.preferences import PairFormat, PreferenceData


@dataclass(kw_only=True)
class PairDataOptions(ExampleOptions):
    """Pairs of responses to train on."""

    prompt_key: str | None = None
    """Column of the prompt: text or chat messages. Default: the first of `prompt`, `instruction` (with its `input`),
    `question`, `query`, `problem` and `input` that exists, else the common beginning of the two responses."""
    chosen_key: str = "chosen"
    """Column of the better response: text, or a list of chat messages."""
    rejected_key: str = "rejected"
    """Column of the worse response: text, or a list of chat messages."""
    max_tokens: Count = 512
    """Maximum number of tokens of a response with its prompt. Pairs with a longer one are excluded and counted."""


@dataclass(kw_only=True)
class PairOptions(SupervisedOptions):
    """Groups of options of a recipe that learns from pairs of a better and a worse response."""

    EXAMPLES: ClassVar[str] = "pairs"
    GROUP_SIZE: ClassVar[int] = 2
    LEARNS_RESPONSES: ClassVar[bool] = False
    """True if the model learns the tokens of the responses, False if it learns one number per text."""

    data: PairDataOptions = field(default_factory=PairDataOptions)
    evaluation: HeldOutOptions = field(default_factory=lambda: HeldOutOptions(held_out=256))

    def notes(self, set_options: Collection[str]) -> list[str]:
        """See `SupervisedOptions.notes`."""
        # The common beginning of two responses is not a prompt, so there is nothing to put the template around.
        has_no_prompt = self.data.prompt_key is None and not self.data.apply_chat_template
        idle = [(has_no_prompt, "data.input_template", "it needs a column of prompts; set data.prompt_key")]
        return without_effect(idle, set_options) + super().notes(set_options)

    def load(
        self, source: str, split: str, max_rows: int | None, note: Note | None = None, info: Note | None = None
    ) -> Rows:
        """See `SupervisedOptions.load`."""
        from components.data.preferences import load_pairs

        rows = load_pairs(source, split=split, max_rows=max_rows, seed=self.seed, note=note)
        if info is not None and not is_drawn(source):
            info(f"{source}: {self.pair_format(source).describe_columns(rows)}")
        return rows

    def describe_first(self, rows: Rows, source: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """See `SupervisedOptions.describe_first`."""
        from components.data.preferences import read_pairs

        pairs = read_pairs(rows, self.pair_format(source), tokenizer)
        return self.encoder()(pairs, tokenizer, with_mask=self.LEARNS_RESPONSES).describe_first(tokenizer)

    def encoder(self) -> Callable[..., PreferenceData]:
        """Return the function that tokenizes pairs: `encode_pairs`, or another with the same arguments."""
        from components.data.preferences import encode_pairs

        return encode_pairs

    def pair_format(self, source: str) -> PairFormat:
        """Return the columns and form of the pairs in the rows of a source."""
        from components.data.preferences import PairFormat

        pair_format = PairFormat(
            prompt_key=self.data.prompt_key,
            chosen_key=self.data.chosen_key,
            rejected_key=self.data.rejected_key,
            apply_chat_template=self.data.apply_chat_template,
            input_template=self.data.input_template,
            ignored_columns=column_names(self.data.ignored_columns),
        )
        return pair_format.of(source)
