"""Options of the model that a run starts from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.models.sources import check_model_source, resolve_model
from components.registry import load, require
from training.options.schema import Options, at_home, errors_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


VIEW = "model view", "links"
"""Kind and name of the plug-in that makes a folder for a model with other files."""


@dataclass(kw_only=True)
class ModelOptions(Options, group="model"):
    """The model that the run starts from."""

    path: str = ""
    """Local folder or hub name for `from_pretrained`, or `warm_start:<task>`, which trains and caches a tiny
    demonstration model."""
    attn_implementation: str | None = None
    """Attention kernels: sdpa, eager, flash_attention_2, or another value that transformers accepts. Default:
    transformers chooses."""
    chat_template: str | None = None
    """Chat template that replaces the tokenizer's: Jinja, or path to a file with Jinja. It is saved with the trained
    policy."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as `{enable_thinking: false}`. They are set in the template and saved with
    it."""
    pad_token: str | None = None
    """Padding token. Default: the tokenizer's, or its end token if it has none."""
    tokenizer_path: str | None = None
    """Local folder or hub name of another tokenizer with the same vocabulary. Default: the tokenizer of the model."""
    config_overrides: dict[str, Any] = field(default_factory=dict)
    """Values that override the model's config.json, such as `{max_position_embeddings: 32768}`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = at_home(self.path)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from errors_of(f"model.path={self.path}: ", check_model_source, self.path)
        # Checked here: the plug-ins are only used after the checks of models and data, which may take minutes.
        for name in ("chat_template", "template_arguments"):
            if getattr(self, name):
                yield from errors_of("", require, "chat template", "checked", f"model.{name}=...")
        if self._changed:
            yield from errors_of("", require, *VIEW, self._changed)

    @property
    def _changed(self) -> str:
        """The first option that changes files of the model, for messages. Empty if none is set."""
        names = ("config_overrides", "tokenizer_path", "chat_template")
        return next((f"model.{name}=..." for name in names if getattr(self, name)), "")

    def prepared(self, run_dir: Path) -> ModelOptions:
        """Return the options with the path of a folder that engines can load.

        A missing demonstration model is trained first. A model with changes becomes a folder of links in the run
        folder.
        """
        path = resolve_model(self.path)
        if self._changed:
            view = load(*VIEW, self._changed)
            # In the run folder, which all machines of a run can read. An engine on another one loads the same files.
            path = view(path, run_dir / "model", self.config_overrides, self.tokenizer_path, self.chat_template)
        return replace(self, path=path)

    def tokenizer(self, path: str | None = None) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the model, with the chat template and padding token of these options.

        It pads with its end token if it has no other padding token.

        Args:
            path: folder of the model. Default: `self.path`.
        """
        from components.data.text import load_tokenizer

        tokenizer = load_tokenizer(
            self.tokenizer_path or path or self.path,
            chat_template=self.chat_template,
            pad_token=self.pad_token,
            pad_with_end=True,
            model_path=path or self.path,
        )
        if not self.template_arguments:
            return tokenizer
        return load("chat template", "arguments", "model.template_arguments=...")(tokenizer, self.template_arguments)
