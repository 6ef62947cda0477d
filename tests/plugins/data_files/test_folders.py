"""Data folders: only files inside the folder are read, and they unpack within a limit."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from components.data.records import read_records
from components.data.unpacking import LIMIT_VARIABLE
from plugins.data_files.unpacking import unpacked_bytes
from tests.messages import says

ROWS = [{"q": "a"}]


def folder_with(tmp_path: Path, card: str, name: str = "README.md") -> Path:
    folder = tmp_path / "data"
    (folder / "part").mkdir(parents=True)
    (folder / name).write_text(card)
    for path in (folder / "train.jsonl", folder / "part" / "test.jsonl", tmp_path / "secret.jsonl"):
        path.write_text(json.dumps({"q": path.stem}) + "\n")
    return folder


def card(*files: str) -> str:
    return f"---\nconfigs:\n- config_name: default\n  data_files:\n{''.join(files)}---\n"


@pytest.mark.parametrize(
    "name", ["http://127.0.0.1:9/a.jsonl", "hf://datasets/a/b/c.jsonl", "../secret.jsonl", "/etc/a", "~/a"]
)
@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
def test_a_readme_with_files_outside_of_its_folder_is_refused(tmp_path: Path, name: str, file: str) -> None:
    text = card(f"  - split: train\n    path: {name}\n")
    folder = folder_with(tmp_path, text if file == "README.md" else text.strip("-\n"), file)
    with pytest.raises(ValueError, match=says(folder, name, "outside")):
        read_records(folder)


def test_a_data_dir_of_a_readme_is_inside_its_folder(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "---\nconfigs:\n- config_name: a\n  data_dir: ..\n---\n")
    with pytest.raises(ValueError, match=says(folder, "'..'", "outside")):
        read_records(folder)


def test_a_readme_may_name_the_files_of_each_split(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, card("  - split: train\n    path: part/*\n  - split: dev\n    path: [train.jsonl]\n")
    )
    assert read_records(folder) == [{"q": "test"}]
    assert read_records(folder, split="dev") == [{"q": "train"}]
    assert read_records(f"{folder}@part", split="test") == [{"q": "test"}]


def test_one_of_several_configurations_is_the_default(tmp_path: Path) -> None:
    several = (
        "---\nconfigs:\n- config_name: a\n  data_files: train.jsonl\n- config_name: b\n  data_files: part/*\n{}---\n"
    )
    folder = folder_with(tmp_path, several.format("  default: true\n"))
    assert read_records(folder) == [{"q": "test"}]
    (folder / "README.md").write_text(several.format(""))
    with pytest.raises(ValueError, match=says(folder, "'a'", "'b'", "@")):
        read_records(folder)
    (folder / "README.md").write_text(several.format("  default: true\n  sep: ';'\n"))
    with pytest.raises(ValueError, match=says(folder, "'sep'")):
        read_records(folder)


def test_files_outside_of_a_saved_data_set_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "")
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../secret.jsonl"}]}))
    with pytest.raises(ValueError, match=says(folder, "../secret.jsonl", "outside")):
        read_records(folder)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["../x"]}))
    with pytest.raises(ValueError, match=says(folder, "../x", "outside")):
        read_records(folder)


def test_a_link_in_a_folder_is_followed(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "")
    (folder / "train.jsonl").unlink()
    (folder / "train.jsonl").symlink_to(tmp_path / "secret.jsonl")
    assert read_records(folder) == [{"q": "secret"}]


def test_a_script_in_a_folder_does_not_run(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "")
    (folder / "data.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    assert read_records(folder) == [{"q": "train"}]
    assert not (tmp_path / "ran").exists()


def repeated(text: str, count: int) -> pyarrow.Array:
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), pyarrow.array([text]))


def in_list(values: pyarrow.Array) -> pyarrow.Array:
    struct = pyarrow.StructArray.from_arrays([values], names=["content"])
    return pyarrow.ListArray.from_arrays(pyarrow.array([0, len(values)], pyarrow.int32()), struct)


def parquet(path: Path, table: Any) -> None:
    pyarrow.parquet.write_table(table, path, compression="zstd")


def ipc(path: Path, table: Any, *, stream: bool) -> None:
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with new(path, table.schema, options=options) as file:
        file.write_table(table)


SMALL_MB = 4
"""Limit in these tests in bytes, so that they unpack megabytes instead of gigabytes."""


def write_bomb(path: Path) -> None:
    """Write a file of a few kilobytes that unpacks to 8 MB or more."""
    text = "a" * 2**23
    name = path.name
    if name.endswith(".gz"):
        line = {"csv": f"q\n{text}\n", "json": json.dumps([{"q": text}]), "jsonl": json.dumps({"q": text})}
        path.write_bytes(gzip.compress(line[name.split(".")[1]].encode()))
    elif name == "texts.parquet":
        parquet(path, pyarrow.table({"q": repeated("a" * 2**20, 100)}))
    elif name == "beginnings.parquet":
        column = pyarrow.table({"q": ["a" * 2**20 + str(number) for number in range(50)]})
        encoding = {"q": "DELTA_BYTE_ARRAY"}
        pyarrow.parquet.write_table(column, path, use_dictionary=False, column_encoding=encoding, compression="zstd")
    elif name == "nested.parquet":
        # Parquet cannot be written from nested dictionaries.
        column = in_list(pyarrow.array(["a" * 2**17] * 64))
        parquet(path, pyarrow.table({"q": column}))
    elif name == "numbers.parquet":
        parquet(path, pyarrow.table({"q": pyarrow.array([1] * 2**20)}))
    elif name == "rows.arrow":
        ipc(path, pyarrow.table({"q": pyarrow.nulls(10**8)}), stream=True)
    elif name == "dictionary.arrow":
        ipc(path, pyarrow.table({"q": repeated("a" * 2**20, 100)}), stream=True)
    else:
        ipc(path, pyarrow.table({"q": [text]}), stream=name == "stream.arrow")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "a.csv.gz",
            "a.json.gz",
            "a.jsonl.gz",
            "texts.parquet",
            "nested.parquet",
            "numbers.parquet",
            "beginnings.parquet",
        ),
        *("stream.arrow", "file.arrow", "rows.arrow", "dictionary.arrow"),
    ],
)
def test_a_small_file_that_unpacks_to_a_large_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / name
    write_bomb(path)
    assert path.stat().st_size < 3e6
    monkeypatch.setenv(LIMIT_VARIABLE, str(SMALL_MB / 1000))
    with pytest.raises(ValueError, match=says(name, "GB", LIMIT_VARIABLE)) as caught:
        read_records(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["a.jsonl.gz", "a.csv.gz", "texts.parquet", "numbers.parquet", "file.arrow", "beginnings.parquet"]
)
def test_a_higher_limit_accepts_the_file_and_the_default_is_one_gigabyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / name
    write_bomb(path)
    default = read_records(path)
    monkeypatch.setenv(LIMIT_VARIABLE, "1")
    assert read_records(path) == default
    for wrong in ("none", "-1", "nan", "0"):
        monkeypatch.setenv(LIMIT_VARIABLE, wrong)
        with pytest.raises(ValueError, match=says(LIMIT_VARIABLE, wrong)):
            read_records(path)


def test_the_size_of_dictionaries_is_that_of_all_their_rows() -> None:
    for column in (repeated("a" * 1000, 50), in_list(repeated("a" * 1000, 50))):
        batch = pyarrow.record_batch({"q": column})
        assert 50_000 <= unpacked_bytes(batch) <= 60_000
        assert unpacked_bytes(batch.slice(0, 0)) < 2_000
