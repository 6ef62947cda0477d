"""Rows of a user's own Dataset class."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from components.data.text import TextEncoder, render_prompt
from plugins.verl.dataset_class import load_class_rows
from plugins.verl.standins import collate_fn, compute_position_id_with_mask, copy_to_local, postprocess_data
from tests.messages import says
from tests.recipes.tiny_models import byte_tokenizer

MESSAGES = [{"role": "user", "content": "1+1?"}]
ROW = {"data_source": "sums", "prompt": MESSAGES, "reward_model": {"ground_truth": "2"}, "extra_info": {"index": 7}}
DERIVED = """
from verl.utils.dataset.rl_dataset import RLHFDataset


class OwnDataset(RLHFDataset):
    def _build_messages(self, example):
        messages = super()._build_messages(example)
        return [{"role": "user", "content": messages[0]["content"] + self.config.style.suffix}]
"""
ON_ITS_OWN = """
import numpy as np
import torch
import verl.utils.torch_functional as verl_F
from torch.utils.data import Dataset
from verl.utils.model import compute_position_id_with_mask


class OwnDataset(Dataset):
    def __init__(self, parquet_files, tokenizer, config, processor=None):
        self.tokenizer, self.length = tokenizer, config.max_prompt_length

    def __len__(self):
        return 2

    def __getitem__(self, item):
        text = f"question {item}"
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        ids, mask = verl_F.postprocess_data(ids, torch.ones_like(ids), self.length, 0)
        positions = compute_position_id_with_mask(mask)
        row = {"input_ids": ids[0], "attention_mask": mask[0], "position_ids": positions[0], "data_source": "own"}
        return row | {"reward_model": {"ground_truth": np.int64(item)}, "tools_kwargs": {"a": 1}}
"""


def load(folder: Path, code: str, config: Mapping[str, Any] | None = None, **form: Any) -> list[dict[str, Any]]:
    """Return the rows of the class OwnDataset in a file, created from one row of data."""
    path = folder / "own.py"
    path.write_text(code)
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    files = [str(folder / "rows.jsonl")]
    return load_class_rows(str(path), "OwnDataset", files, byte_tokenizer(), config or {}, **form)


def with_items(items: str) -> str:
    """Return a file with a class that has these items."""
    return f"""
import numpy as np
class OwnDataset:
    def __init__(self, data_files, tokenizer, config, **kwargs):
        self.items = {items}
    def __len__(self):
        return len(self.items)
    def __getitem__(self, item):
        return {{"reward_model": {{"ground_truth": "2"}}, "data_source": "sums", **self.items[item]}}
"""


def test_a_subclass_of_verls_dataset_gets_the_data_keys_and_returns_messages(tmp_path: Path) -> None:
    (row,) = load(tmp_path, DERIVED, {"style": {"suffix": " Be brief."}})
    assert row["input"] == [{"role": "user", "content": "1+1? Be brief."}]
    assert (row["label"], row["datasource"], row["extra_info"]) == ("2", "sums", {"index": 7})


def test_padded_ids_become_the_prompt_and_tool_arguments_are_in_extra_info(tmp_path: Path) -> None:
    rows = load(tmp_path, ON_ITS_OWN, {"max_prompt_length": 40})
    assert [row["input"] for row in rows] == ["question 0", "question 1"]
    assert [row["label"] for row in rows] == [0, 1]
    assert rows[0]["extra_info"] == {"tools_kwargs": {"a": 1}}
    assert len(load(tmp_path, ON_ITS_OWN, {"max_prompt_length": 40}, max_rows=1)) == 1


def test_ids_equal_to_the_rendered_messages_keep_the_messages(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    ids = TextEncoder(tokenizer).encode_prompt(render_prompt(MESSAGES, tokenizer))
    both = f"""[{{"raw_prompt": np.array({MESSAGES!r}, dtype=object), "raw_prompt_ids": {ids}}}]"""
    assert load(tmp_path, with_items(both))[0]["input"] == MESSAGES
    (row,) = load(tmp_path, with_items(both.replace(str(ids), str(ids[1:]))))
    assert TextEncoder(tokenizer).encode_prompt(row["input"]) == ids[1:]


@pytest.mark.parametrize(
    ("items", "facts"),
    [
        ("[{'raw_prompt': [{'role': 'user', 'content': 'a'}], 'multi_modal_data': {'image': [1]}}]", ["row 0", "text"]),
        ("[{}]", ["row 0", "'prompt'"]),
        ("[{'prompt': 'a'}, {'prompt': 1 / 0}]", ["cannot be made", "ZeroDivisionError"]),
        ("[{'prompt': 'a', 'reward_model': {}}]", ["row 0", "ground_truth"]),
        ("[]", ["no rows"]),
        ("[{'raw_prompt_ids': [255, 254]}]", ["row 0", "token ids", "raw_prompt"]),
    ],
)
def test_an_unusable_item_of_a_dataset_class_raises_an_error_with_its_row(
    tmp_path: Path, items: str, facts: list[str]
) -> None:
    with pytest.raises(ValueError, match=says("own.py", "OwnDataset", *facts)):
        load(tmp_path, with_items(items))


@pytest.mark.parametrize(
    ("code", "facts"),
    [
        ("import lost_module\n", ["cannot be loaded", "lost_module"]),
        ("OwnDataset = 1\n", ["no Dataset class", "__getitem__"]),
        ("class Other:\n    pass\n", ["cannot be loaded", "OwnDataset"]),
        (DERIVED, ["row 0 cannot be read", "style"]),
    ],
)
def test_an_unusable_dataset_class_raises_an_error_with_the_reason(tmp_path: Path, code: str, facts: list[str]) -> None:
    with pytest.raises(ValueError, match=says("data.class_path", "own.py", *facts)):
        load(tmp_path, code)


def test_stand_ins_of_verl_functions_give_the_results_of_verl() -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    mask = torch.ones_like(ids)
    for side, kept in (("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])):
        assert postprocess_data(ids, mask, 3, 0, truncation=side)[0].tolist() == [kept]
    with pytest.raises(ValueError, match=says("5 tokens", "max_length=3")):
        postprocess_data(ids, mask, 3, 0)
    padded, padded_mask = postprocess_data(ids, mask, 7, 9)
    assert padded.tolist() == [[9, 9, 1, 2, 3, 4, 5]]
    assert compute_position_id_with_mask(padded_mask).tolist() == [[0, 0, 0, 1, 2, 3, 4]]
    batch = collate_fn([{"ids": ids[0], "name": "a"}, {"ids": ids[0], "name": "b"}])
    assert batch["ids"].shape == (2, 5)
    assert batch["name"].tolist() == ["a", "b"]
    with pytest.raises(ValueError, match=says("HDFS")):
        copy_to_local("hdfs://a")
