"""Damaged and hostile model files are refused quickly, in one line, before anything starts."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from components.models.disk.tensor_file import TensorReader
from components.models.disk.tensor_header import MOST_TENSORS
from components.models.size import model_size
from components.net.hub_requests import find_model
from plugins.model_checks.files import check_weight_files
from tests.messages import says
from tests.model_folders import LARGE
from training.launch.model_checks import check_model

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file_of(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def text(**entries: Any) -> bytes:
    return json.dumps(entries).encode()


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (b"", ["0 bytes", "the file 0"]),
        (b"abc", ["the file 3"]),
        (file_of(b"{}", length=2**63), [2**63, "the file 10"]),
        (file_of(b"{}", length=11), ["header has 11 bytes"]),
        (file_of(b"[]"), ["list"]),
        (file_of(b"{"), ["header"]),
        (file_of(b"[" * 100_000), ["header"]),
        (file_of(b"\xff"), ["header"]),
        (file_of(text(a=ENTRY), b"1234567"), ["describes"]),
        (file_of(text(a=ENTRY), b"123456789"), ["describes"]),
        (file_of(b'{"a": 1, "a": 2}'), ["'a'", "twice"]),
        (file_of(text(a=ENTRY, b=ENTRY), b"12345678"), ["'b'", "byte 0", "8 is expected"]),
        (file_of(text(a=ENTRY | {"shape": [-2]}), b"12345678"), ["'a'", "-2"]),
        (file_of(text(a=ENTRY | {"data_offsets": [8, 0]}), b"12345678"), ["'a'"]),
        (file_of(text(a=ENTRY | {"dtype": 7}), b"12345678"), ["'a'"]),
        (file_of(text(a=[]), b""), ["'a'"]),
    ],
)
def test_a_damaged_file_is_refused_with_its_name_and_the_damage(
    content: bytes, facts: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=says(tmp_path / "model.safetensors", *facts)):
        check_weight_files(tmp_path)
    with pytest.raises(ValueError, match=says(*facts)):
        TensorReader(tmp_path / "model.safetensors")


def test_a_header_with_too_many_tensors_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    entries = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(MOST_TENSORS + 1)}
    (tmp_path / "model.safetensors").write_bytes(file_of(text(**entries)))
    with pytest.raises(ValueError, match=says(MOST_TENSORS + 1, MOST_TENSORS)):
        check_weight_files(tmp_path)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_an_index_with_a_path_outside_of_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match=says("model.safetensors.index.json", repr(name))):
        check_weight_files(tmp_path)


def test_an_index_with_missing_files_or_of_a_wrong_type_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ValueError, match=says("model-00001-of-00002.safetensors", "missing")):
        check_weight_files(tmp_path)
    for content in ("[1]", "{", '{"weight_map": []}', "{}"):
        index.write_text(content)
        with pytest.raises(ValueError, match=says(index, "no index")):
            check_weight_files(tmp_path)


def test_files_written_by_safetensors_are_accepted(tmp_path: Path) -> None:
    check_weight_files(tmp_path)  # there may be no message
    tensors = {"a": torch.ones(3, 2), "b": torch.ones(5, dtype=torch.bfloat16), "empty": torch.ones(0)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10**7),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 1e300),
        ("num_hidden_layers", True),
        ("hidden_size", -64),
        ("hidden_size", 10**12),
        ("hidden_size", "64"),
        ("vocab_size", 10**12),
        ("max_position_embeddings", 10**15),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_an_impossible_model_size_is_refused_immediately(name: str, value: Any, nested: bool, tmp_path: Path) -> None:
    sizes = LARGE | {name: value}
    config = {"model_type": "llava", "text_config": sizes} if nested else sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says("model.path", tmp_path, "config.json", name, repr(value))):
        check_model(str(tmp_path))
    assert model_size(str(tmp_path)) is None


@pytest.mark.parametrize("content", ["[1]", "{", '{"a": ' * 100_000, "1"])
def test_a_config_that_is_not_a_json_object_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=says("config.json cannot be used")):
        find_model(str(tmp_path))


def test_a_recipe_with_a_damaged_model_exits_with_code_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    (tmp_path / "model.safetensors").write_bytes(file_of(b"{}", length=2**63))
    main = import_module("recipes.grpo.main").main
    options = [f"model.path={tmp_path}", "data.path=task:sort", "reward.source=exact_match", "backend=local"]
    assert main([*options, f"run_dir={tmp_path}/run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(says("model.path", "model.safetensors", "damaged", 2**63), line)
