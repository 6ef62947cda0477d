"""Options of the model that a run starts from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.models.sources import check_model_source, resolve_model
from training.options.schema import Options, at_home, errors_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True)
class ModelOptions(Options, group="model"):
    """The model that the run starts from."""

    path: str = ""
    """A folder or hub name that `from_pretrained` takes, or `warm_start:<task>`, which makes and keeps a tiny
    demonstration model."""
    attn_implementation: str | None = None
    """Attention kernels: sdpa, eager, flash_attention_2, or whatever transformers takes. Default: its own choice."""
    chat_template: str | None = None
    """Chat template instead of the tokenizer's own: Jinja, or a file with it. Saved with the trained policy."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, as `{enable_thinking: false}`. They are set in the template and saved with it."""
    pad_token: str | None = None
    """Token that fills short rows. Default: the tokenizer's own, or its end token where it names none."""
    tokenizer_path: str | None = None
    """Folder or hub name of another tokenizer with the same vocabulary. Default: the model's own."""
    config_overrides: dict[str, Any] = field(default_factory=dict)
    """Other values for the model's config.json, as `{max_position_embeddings: 32768}`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = at_home(self.path)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from errors_of(f"model.path={self.path}: ", check_model_source, self.path)

    def prepared(self, run_dir: Path) -> ModelOptions:
        """With the path of a folder that engines can load: a demonstration's model is made where it is not there yet,
        and one that is to be changed is a folder of links in the run folder.
        """
        from training.launch.model_folder import model_view

        path = resolve_model(self.path)
        view = model_view(path, run_dir / "model", self.config_overrides, self.tokenizer_path, self.chat_template)
        return replace(self, path=view)

    def tokenizer(self, path: str | None = None) -> PreTrainedTokenizerBase:
        """The model's tokenizer, or that of the model at `path`, with the template and token given here. It pads with
        its end token where it has no other.
        """
        from components.data.text import load_tokenizer, set_template_arguments

        found = self.tokenizer_path or path or self.path
        tokenizer = load_tokenizer(
            found,
            chat_template=self.chat_template,
            pad_token=self.pad_token,
            pad_with_end=True,
            model_path=path or self.path,
        )
        return set_template_arguments(tokenizer, self.template_arguments)
