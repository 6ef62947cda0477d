"""The options of this recipe, beside those that supervised recipes share; `--help all` describes them.

`--flag value` and `flag=value` mean the same; `--config FILE` reads YAML. OpenRLHF's names of train_sft are understood.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from components.data.columns import column_names
from components.data.mixture import Note
from components.models.sources import NEW_KIND, check_model_source, config_of
from components.schemes import has_scheme_of
from training.options.checkpoint_options import CheckpointOptions
from training.options.model_options import ModelOptions
from training.options.schema import errors_of
from training.options.supervised_options import ExampleOptions, Rows, SupervisedOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.data.supervised import DemonstrationFormat

NEW = "new:"
"""How `model.path` begins where it names a task, for which the trainer makes a model: `new:<task>`."""


@dataclass(kw_only=True)
class DemonstrationOptions(ExampleOptions):
    """The demonstrations to train on."""

    prompt_key: str | None = None
    """Column of the prompt, text or chat messages; without a response_key, of whole conversations. Default: `messages`
    or `conversations`, or the prompt of a usual pair: `prompt`, `instruction` (with its `input`), `question`, `query`,
    `problem` or `input`."""
    response_key: str | None = None
    """Column of the response, text or chat messages. Default: that of a usual pair, `response`, `completion`, `output`,
    `answer` or `solution`, or none beside a prompt_key."""
    multiturn: bool = True
    """Learn every turn of the assistant in a conversation; otherwise only the last one."""
    plain_text: bool = False
    """Rows are texts, in the column prompt_key, `text` or `input`, and every token is learnt; what is too long is
    cut."""

    def form(self, source: str) -> DemonstrationFormat:
        """Where the rows of a source have their demonstrations."""
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
    """Learn to respond as the demonstrations do."""

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
            yield f"model.path={self.model.path}: this recipe makes a model for a task; set model.path={NEW}<task>"

    @property
    def models(self) -> dict[str, str]:
        """See `SupervisedOptions.models`."""
        return {} if self.model.path.startswith(NEW) else super().models

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
