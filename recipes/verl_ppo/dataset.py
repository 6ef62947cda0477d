"""verl's `RLHFDataset` as Python; a run reads its prompts by the options `data.*` instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.data.prompts import PromptSource
from components.registry import load

from .config import ROW_FORMAT


class RLHFDataset:
    """Prompts of parquet, json or jsonl files in verl's format, as token ids; a map-style dataset."""

    def __init__(
        self, data_files: str | Sequence[str], tokenizer: Any, config: Mapping[str, Any] | None = None
    ) -> None:
        """
        Args:
            data_files: one file or several.
            tokenizer: its chat template renders prompts that are messages.
            config: verl's `data.*`: `prompt_key`, `reward_fn_key`, `max_prompt_length`. Longer prompts are left out, or
                with `filter_overlong_prompts=False` cut on the side that `truncation` names.
        """
        options = dict(config or {})
        cuts = not options.get("filter_overlong_prompts", True)
        files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.rows: list[dict[str, Any]] = load(*ROW_FORMAT)(
            files,
            prompt_key=options.get("prompt_key", "prompt"),
            source_key=options.get("reward_fn_key", "data_source"),
            # The class only provides prompts. Rewards are computed elsewhere.
            needs_truth=False,
        )
        self._prompts = PromptSource(
            self.rows,
            tokenizer,
            seed=0,
            shuffle=False,
            max_prompt_tokens=options.get("max_prompt_length"),
            overlong=options.get("truncation", "left") if cuts else "leave_out",
        )
        self._batch = self._prompts.take(len(self._prompts))

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._batch.select([index])
        names = ("prompt", "label", "datasource")
        return {"input_ids": row.row(0, "tokens"), **{name: row[name][0] for name in names}}
