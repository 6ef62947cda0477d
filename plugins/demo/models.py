"""Model sources for the values of `model.path`: `warm_start:<task>`, `expert:<task>`, `new:<task>` and `new:text`.

This module imports without torch; making a tokenizer or a model imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.models.new_model import NewModel
from components.models.sources import MadeModel
from plugins.demo.tasks import Task, get_task
from plugins.demo.warm_start import WarmStartSettings, check_warm_start, ensure_warm_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT = "text"
"""Name of the new model whose vocabulary is trained on the texts of the data."""
SHAPE: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
"""Shape of the models that tiny_model.py makes."""
MARKS = 3
"""Number of special tokens: pad, bos and eos."""
BYTES = 256


def config_of_task(task: Task) -> dict[str, Any]:
    """Return the values of config.json that set the size of a task's model."""
    return SHAPE | {"vocab_size": task.vocabulary or len(task.alphabet) + MARKS}


class WarmStartModel(MadeModel):
    """`warm_start:<task>`: a model trained on a task's demonstrations, most of which are not correct answers."""

    IS_CORRECT = False
    """See `WarmStartSettings.is_correct`."""

    def __init__(self, name: str) -> None:
        """See `MadeModel`."""
        super().__init__(name)
        self._task = get_task(name)
        self._settings = WarmStartSettings(task=name, is_correct=self.IS_CORRECT)

    @property
    def data_source(self) -> str:
        """See `MadeModel.data_source`."""
        return f"task:{self.name}"

    def check(self) -> None:
        """See `MadeModel.check`."""
        check_warm_start(self._settings)

    def make(self, progress: Callable[[str], None]) -> Path:
        """See `MadeModel.make`."""
        return ensure_warm_start(self._settings, progress)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """See `MadeModel.tokenizer`."""
        # Imported here: a driver that only plans a run has no torch.
        from plugins.demo.tiny_model import task_tokenizer

        return task_tokenizer(self._task)

    def config(self) -> dict[str, Any]:
        """See `MadeModel.config`."""
        return config_of_task(self._task)


class ExpertModel(WarmStartModel):
    """`expert:<task>`: a model trained on correct responses only, such as the teacher of a demonstration."""

    IS_CORRECT = True


class NewTinyModel(NewModel):
    """`new:<task>` and `new:text`: a model with random weights."""

    def __init__(self, name: str) -> None:
        """See `NewModel`."""
        super().__init__(name)
        self._task = None if name == TEXT else get_task(name)

    def tokenizer(self, texts: Iterable[str] = (), vocabulary: int | None = None) -> PreTrainedTokenizerBase:
        """See `NewModel.tokenizer`."""
        from plugins.demo.tiny_model import learnt_tokenizer, task_tokenizer

        if self._task is not None:
            return task_tokenizer(self._task)
        # Without a size, the vocabulary has the special tokens and all bytes, so that any text can be encoded.
        return learnt_tokenizer(texts, MARKS + BYTES if vocabulary is None else vocabulary)

    def save(
        self, tokenizer: PreTrainedTokenizerBase, folder: str, seed: int, max_positions: int | None = None
    ) -> None:
        """See `NewModel.save`."""
        from plugins.demo.tiny_model import tiny_model

        # A longer prompt or response needs more positions than the default shape has.
        positions = SHAPE["max_position_embeddings"] if max_positions is None else max_positions
        tiny_model(tokenizer, seed, max_positions=positions).save_pretrained(folder)

    def config(self) -> dict[str, Any] | None:
        """See `NewModel.config`."""
        return None if self._task is None else config_of_task(self._task)
