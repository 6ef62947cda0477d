"""Replacements for the parts of verl that a user's Dataset class imports, for machines without verl.

Names and signatures are verl's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from components.data.records import read_records


class RLHFDataset(Dataset[dict[str, Any]]):
    """Base class of users' datasets: rows of files, with the prompt of each row as `raw_prompt`.

    The run filters long prompts later.
    """

    def __init__(
        self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        if isinstance(data_files, str):
            data_files = [data_files]
        self.data_files = list(data_files)
        self.original_data_files = list(self.data_files)
        self.tokenizer = tokenizer
        self.processor = processor
        self.config = config
        self.max_samples = max_samples
        self.cache_dir = str(Path(config.get("cache_dir", "~/.cache/verl/rlhf")).expanduser())
        self.prompt_key = config.get("prompt_key", "prompt")
        self.image_key = config.get("image_key", "images")
        self.video_key = config.get("video_key", "videos")
        self.max_prompt_length = config.get("max_prompt_length", 1024)
        self.return_raw_chat = config.get("return_raw_chat", False)
        self.return_full_prompt = config.get("return_full_prompt", False)
        self.truncation = config.get("truncation", "error")
        self.filter_overlong_prompts = config.get("filter_overlong_prompts", True)
        self.apply_chat_template_kwargs = config.get("apply_chat_template_kwargs", {})
        self.need_tools_kwargs = config.get("need_tools_kwargs", False)
        self.num_workers = config.get("filter_overlong_prompts_workers", 1)
        self.shuffle = config.get("shuffle", False)
        self.seed = config.get("seed")
        self.serialize_dataset = False
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        files = self.data_files
        if use_origin_parquet:
            files = self.original_data_files
        self.data_files = [copy_to_local(file) for file in files]

    def _read_files_and_tokenize(self) -> None:
        """Read all files into `self.dataframe`, a dataset of Hugging Face's `datasets`."""
        import datasets

        self.dataframe = datasets.concatenate_datasets(
            [datasets.Dataset.from_list(read_records(file)) for file in self.data_files]
        )
        if 0 < self.max_samples < len(self.dataframe):
            chosen = np.arange(self.max_samples)
            if self.shuffle:
                generator = np.random.default_rng(self.seed)
                chosen = generator.choice(len(self.dataframe), size=self.max_samples, replace=False)
            self.dataframe = self.dataframe.select(chosen.tolist())
        self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Return the rows unchanged: the run filters long prompts itself."""
        return dataframe

    def _build_messages(self, example: dict[str, Any]) -> Any:
        return example[self.prompt_key]

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.dataframe[item])
        row["raw_prompt"] = self._build_messages(row)
        extra = row.get("extra_info") or {}
        row |= {"extra_info": extra, "index": extra.get("index", 0)}
        return row | {name: extra.get(name) or {} for name in ("tools_kwargs", "interaction_kwargs")}


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stack the tensors of rows, and put their other values into arrays of objects."""
    columns: dict[str, list[Any]] = defaultdict(list)
    for row in data_list:
        for name, value in row.items():
            columns[name].append(value)
    stacked: dict[str, Any] = {}
    for name, values in columns.items():
        if isinstance(values[0], Tensor):
            stacked[name] = torch.stack(values)
        else:
            # np.array would turn lists of equal length into a matrix.
            stacked[name] = np.fromiter(values, dtype=object, count=len(values))
    return stacked


def copy_to_local(src: str, *_: Any, **__: Any) -> str:
    """Return the path of a local file.

    Raises:
        ValueError: the file is on HDFS.
    """
    if str(src).startswith("hdfs://"):
        raise ValueError(f"{src} is on HDFS; copy it to a local folder")
    return str(Path(src).expanduser())


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Return the position of each token among those of the mask."""
    return torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Pad or cut ids and mask [1, T] to `max_length`.

    Raises:
        ValueError: they are longer, and `truncation` is `error`.
    """
    length = input_ids.shape[-1]
    if length < max_length:
        sides = (0, max_length - length)
        if left_pad:
            sides = (max_length - length, 0)
        pad = torch.nn.functional.pad
        return pad(input_ids, sides, value=pad_token_id), pad(attention_mask, sides, value=0)
    if length > max_length and truncation not in ("left", "right", "middle"):
        raise ValueError(f"{length} tokens are more than max_length={max_length}; set data.truncation to a side")
    first = {"left": 0, "right": max_length, "middle": max_length // 2}.get(truncation, max_length)
    kept = [*range(first), *range(length - (max_length - first), length)]
    return input_ids[..., kept], attention_mask[..., kept]


MODULES: Mapping[str, Mapping[str, Any]] = {
    "verl.utils.dataset": {"RLHFDataset": RLHFDataset, "collate_fn": collate_fn},
    "verl.utils.dataset.rl_dataset": {"RLHFDataset": RLHFDataset, "collate_fn": collate_fn},
    "verl.utils.fs": {"copy_to_local": copy_to_local},
    "verl.utils.model": {"compute_position_id_with_mask": compute_position_id_with_mask},
    "verl.utils.torch_functional": {"postprocess_data": postprocess_data},
}
"""Modules of verl -> the names in them."""
