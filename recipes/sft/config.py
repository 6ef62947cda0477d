"""Options of this recipe. Those of all supervised recipes are in training/options/supervised_options.py.

`--flag value` and `flag=value` are equivalent. `--config FILE` reads YAML. `--help all` describes every option. The
flags of OpenRLHF's train_sft are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from components.data.mixture import Note
from components.models.sources import NEW_KIND, check_model_source, config_of
from components.schemes import has_scheme_of
from training.options.checkpoint_options import CheckpointOptions
from training.options.model_options import ModelOptions
from training.options.schema import column_names, errors_of
from training.options.supervised_options import ExampleOptions, Rows, SupervisedOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.data.supervised import DemonstrationFormat

NEW = "new:"
"""Prefix of a `model.path` that names a task: `new:<task>` creates an untrained model for it."""


@dataclass(kw_only=True)
class DemonstrationOptions(ExampleOptions):
    """The demonstrations to train on."""

    prompt_key: str | None = None
    """Column of the prompt: text or chat messages. Without a response_key it holds whole conversations. Default:
    `messages` or `conversations`, or the prompt of a known pair of columns: `prompt`, `instruction` (with its `input`),
    `question`, `query`, `problem` or `input`."""
    response_key: str | None = None
    """Column of the response: text or chat messages. Default: the response of a known pair of columns, `response`,
    `completion`, `output`, `answer` or `solution`; none if prompt_key is set."""
    multiturn: bool = True
    """Train on every assistant turn of a conversation. `false` trains on the last one only."""
    plain_text: bool = False
    """Train on every token of plain texts in the column prompt_key, `text` or `input`. Texts above data.max_tokens are
    truncated."""

    def form(self, source: str) -> DemonstrationFormat:
        """Return the columns and the rendering of the demonstrations of a source."""
        from components.data.supervised import DemonstrationFormat

        form = DemonstrationFormat(
            prompt_key=self.prompt_key,
            response_key=self.response_key,
            apply_chat_template=self.apply_chat_template,
            input_template=self.input_template,
            multiturn=self.multiturn,
            plain_text=self.plain_text,
            ignored_columns=column_names(self.ignored_columns),
        )
        return form.of(source)


@dataclass(kw_only=True)
class SFTConfig(SupervisedOptions):
    """Supervised fine-tuning on demonstrations."""

    ADAPTERS: ClassVar = ("openrlhf.train_sft",)
    EXAMPLES: ClassVar[str] = "demonstrations"

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DemonstrationOptions = field(default_factory=DemonstrationOptions)
    checkpoint: CheckpointOptions = field(default_factory=lambda: CheckpointOptions(every=100))

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        path = self.model.path
        is_known = has_scheme_of(NEW_KIND, path) and not list(errors_of("", check_model_source, path))
        if is_known and config_of(path) is None:
            yield f"model.path={self.model.path}: this recipe creates new models for tasks; set model.path={NEW}<task>"

    @property
    def models(self) -> dict[str, str]:
        """See `SupervisedOptions.models`."""
        if self.model.path.startswith(NEW):
            return {}
        return super().models

    def check_examples(self, rows: Rows, source: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """See `SupervisedOptions.check_examples`."""
        from components.data.supervised import check_demonstrations

        check_demonstrations(rows, tokenizer, self.data.form(source))

    def describe_first(self, rows: Rows, source: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """See `SupervisedOptions.describe_first`."""
        from components.data.supervised import encode_demonstrations

        data = encode_demonstrations(rows, tokenizer, self.data.form(source))
        return [f"first demonstration {data.describe_first(tokenizer)}"]

    def load(
        self, source: str, split: str, max_rows: int | None, note: Note | None = None, info: Note | None = None
    ) -> Rows:
        """See `SupervisedOptions.load`."""
        from components.data.supervised import load_demonstrations

        form = self.data.form(source)
        return load_demonstrations(source, form, split=split, max_rows=max_rows, seed=self.seed, note=note, info=info)
