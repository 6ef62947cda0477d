"""Rows from files, folders and a hub."""

import gzip
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import datasets.config
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from components.data.records import read_records
from tests.components.helpers.closed_port import closed_port
from tests.messages import says

PROJECT = Path(__file__).parents[3]
RECORDS = [{"question": "ab", "answer": 1}, {"question": "c\nd, e", "answer": 2}]
AS_TEXT = [{name: str(cell) for name, cell in record.items()} for record in RECORDS]
"""The same rows in a CSV file, whose cells have no types."""


def write(path: Path, records: list[dict[str, Any]] = RECORDS) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(records))
        return path
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, records)) + "\n")
        return path
    table = pyarrow.Table.from_pylist(records)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a temporary cache folder, because the library reads the location of its cache at import."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet", ".csv", ".arrow"])
def test_all_file_types_give_the_same_records(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"data{suffix}")
    assert read_records(path) == (AS_TEXT if suffix == ".csv" else RECORDS)
    with pytest.raises(ValueError, match=says(str(path), "'train'", "'test'")):
        read_records(str(path), split="test")


def test_an_arrow_stream_of_datasets_reads_like_any_other_file(tmp_path: Path) -> None:
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path)
    assert read_records(next(tmp_path.glob("*.arrow"))) == RECORDS


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv"])
def test_a_gzipped_file_of_text_reads_like_the_file_in_it(tmp_path: Path, suffix: str) -> None:
    text = write(tmp_path / f"data{suffix}", [*RECORDS, {"question": "ä\u2028", "answer": 3}]).read_bytes()
    packed = tmp_path / f"packed.of.data{suffix}.gz"
    packed.write_bytes(gzip.compress(text))
    assert read_records(packed) == read_records(tmp_path / f"data{suffix}")
    assert read_records(packed)[2] == {"question": "ä\u2028", "answer": "3" if suffix == ".csv" else 3}
    for content in (gzip.compress(text)[:-12], text, gzip.compress(text)[:20] + b"?" * 20):
        packed.write_bytes(content)
        with pytest.raises(ValueError, match=says(packed)) as caught:
            read_records(packed)
        assert "\n" not in str(caught.value)


def test_a_date_in_a_csv_file_stays_text(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("input,label\nwhen?,2024-01-31\nand then?,2024-02-01\n")
    assert read_records(tmp_path / "data.csv")[0] == {"input": "when?", "label": "2024-01-31"}


def test_a_row_of_a_csv_file_may_be_longer_than_the_read_buffer(tmp_path: Path) -> None:
    records = [{"input": "a"}, {"input": "line\n" * 500_000}, {"input": "b"}]
    assert read_records(write(tmp_path / "data.csv", records)) == records


def test_a_json_file_may_have_one_object_per_line(tmp_path: Path) -> None:
    (tmp_path / "lines.json").write_text('{"input": "a"}\n\n{"input": "b"}\n')
    assert read_records(tmp_path / "lines.json") == [{"input": "a"}, {"input": "b"}]


def test_a_line_separator_inside_a_json_string_does_not_end_the_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"input": "a\u2028b"}\n\n', encoding="utf-8")
    assert read_records(path) == [{"input": "a\u2028b"}]


def test_a_saved_data_set_has_its_splits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = datasets.Dataset.from_list(RECORDS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(tmp_path / "two")
    capfd.readouterr()
    assert read_records(tmp_path / "one") == RECORDS
    assert read_records(tmp_path / "two") == RECORDS
    assert read_records(tmp_path / "two", split="test") == RECORDS[1:]
    assert read_records(f"{tmp_path}@two", split="test") == RECORDS[1:]
    for name, splits in (("one", ["'train'"]), ("two", ["'train'", "'test'"])):
        with pytest.raises(ValueError, match=says(tmp_path / name, "'dev'", *splits)):
            read_records(tmp_path / name, split="dev")
    assert capfd.readouterr() == ("", "")


def test_splits_of_a_folder_follow_from_file_names(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mixed = [{"input": "a", "label": {"x": 1}}, {"input": "b", "label": ["1", 2.5, None]}, {"input": "c", "label": "d"}]
    write(tmp_path / "train.jsonl", mixed[::-1])
    write(tmp_path / "test.jsonl", mixed)
    (tmp_path / "more").mkdir()
    write(tmp_path / "more" / "train.csv")
    before = datasets.is_progress_bar_enabled()
    assert read_records(tmp_path, split="test") == mixed
    assert read_records(f"{tmp_path}@more") == AS_TEXT
    with pytest.raises(ValueError, match=says(tmp_path, "'dev'", "'train'")):
        read_records(tmp_path, split="dev")
    assert capfd.readouterr() == ("", "")
    assert datasets.is_progress_bar_enabled() == before


def test_a_bad_file_or_folder_is_described_in_a_one_line_error(tmp_path: Path) -> None:
    def refused(name: str, content: bytes | None, *facts: object) -> None:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=says(path, *facts)) as caught:
            read_records(path)
        assert "\n" not in str(caught.value)

    file_types = (".json", ".jsonl", ".parquet", ".csv", ".arrow")
    refused("nothing.jsonl", None, *file_types)
    refused("nothing", None, *file_types)
    refused("bad.jsonl", b'{"input": "a"}\n{"input": \n', "line 2", "JSON")
    refused("digits.jsonl", b'{"input": ' + b"9" * 5000 + b"}", "line 1", "digits")
    refused("deep.json", b"[" * 100_000 + b"]" * 100_000, "deep")
    refused("deep.jsonl", b'{"input": "a"}\n' + b"[" * 100_000 + b"]" * 100_000, "line 2", "deep")
    refused("half.jsonl", rb'{"input": "\ud83d\ude00"}' + b"\n" + rb'{"input": ["a\ud83d"]}', "line 2", "ud83d")
    for name in ("data.txt", "data.txt.gz", "data.gz"):
        refused(name, b"a", *file_types)
    refused("empty.json", b"[]", "list", "length 0")
    refused("object.json", b'{"data": []}', "list", "dict", "length 1")
    refused("empty.csv", b"input,label\n", "list", "length 0")
    refused("numbers.json", b'[{"a": 1}, 3]', "row 1", "int", 3)
    refused("latin.jsonl", b'{"input": "\xe4"}', "UTF-8", "0xe4")
    for name in ("broken.parquet", "broken.csv", "broken.arrow"):
        refused(name, b"")
    (tmp_path / "folder").mkdir()
    refused("folder", None, "'train'", *file_types)
    write(tmp_path / "folder" / "data.jsonl", RECORDS[:0])
    refused("folder", None)


@pytest.mark.parametrize("name", ["./data", "~/no/such", "../data", "nothing.csv", "some/nothing.jsonl.gz", "a/b/c"])
def test_a_name_that_looks_like_a_path_is_not_requested_from_the_hub(name: str) -> None:
    with pytest.raises(ValueError, match=says(f"'{name}'", ".json", ".parquet")) as caught:
        read_records(name)
    # The message of the hub is the cause of the error.
    assert caught.value.__cause__ is None


def test_the_name_of_a_file_type_does_not_read_files_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data.csv")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says("'csv'", "file type")):
        read_records("csv")


SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """A minimal hub with a single data set, troupe/letters, which has one file."""

    content = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
    name = "data/train.jsonl"
    entry: ClassVar = {"type": "file", "path": name, "size": len(content), "oid": "1" * 40}

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == f"/datasets/troupe/letters/resolve/{SHA}/{self.name}":
            headers = {"ETag": '"1"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
            self.response(200, self.content, headers)
        elif path in ("/api/datasets/troupe/letters", f"/api/datasets/troupe/letters/revision/{SHA}"):
            siblings = [{"rfilename": self.name}]
            self.response(200, {"id": "troupe/letters", "sha": SHA, "siblings": siblings, "private": False})
        elif path.startswith(f"/api/datasets/troupe/letters/tree/{SHA}"):
            self.response(200, self.listing(path.partition(SHA)[2].strip("/").replace("%2F", "/")))
        else:
            mine = path.startswith(("/datasets/troupe/letters/", "/api/datasets/troupe/letters/"))
            self.response(404, {}, {"X-Error-Code": "EntryNotFound" if mine else "RepoNotFound"})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        requested_paths = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.response(200, [self.entry] if "train.jsonl" in requested_paths else [])

    def listing(self, folder: str) -> list[dict[str, Any]]:
        if folder == "data" or "recursive=true" in self.path.lower():
            return [self.entry]
        return [{"type": "directory", "path": "data", "size": 0, "oid": "2" * 40}]

    def response(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


@contextmanager
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def read_in_process(sources: list[str], home: Path, endpoint: str) -> list[str]:
    """Return the output of a process with this hub and an empty cache for each source, and whether it slept."""
    code = "import sys, time; from components.data.records import read_records as read\n"
    code += "time.sleep = lambda seconds: print('sleeps')\n"
    code += "for source in sys.argv[1:]:\n try: print(read(source))\n except ValueError as error: print(error)"
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    process = subprocess.run(
        [sys.executable, "-c", code, *sources], env=env, cwd=PROJECT, capture_output=True, text=True, timeout=200
    )
    assert process.stderr == ""
    return process.stdout.splitlines()


def test_a_dataset_name_is_read_from_the_hub_or_its_cache_or_refused_in_one_line(tmp_path: Path) -> None:
    with hub() as endpoint:
        actual = read_in_process(["troupe/letters", "troupe/letters@data", "troupe/other"], tmp_path, endpoint)
    assert actual[:2] == [str(RECORDS)] * 2
    (refusal,) = actual[2:]
    # The message contains that of the library.
    assert re.search(says("'troupe/other'", "'train'", "doesn't exist on the Hub"), refusal)
    # The libraries would retry five times with pauses.
    with closed_port() as port:
        again, other = read_in_process(["troupe/letters", "troupe/more"], tmp_path, f"http://127.0.0.1:{port}")
    assert again == str(RECORDS)
    assert re.search(says("'troupe/more'", "Connection refused"), other)


def test_a_byte_order_mark_is_not_part_of_the_data(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"input": "a"}\n'), ("a.json", '[{"input": "a"}]')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert read_records(tmp_path / name) == [{"input": "a"}]


def test_a_value_without_a_python_equivalent_raises_an_error_with_its_file(tmp_path: Path) -> None:
    no_text = pyarrow.array([b"\xff"], pyarrow.binary()).view(pyarrow.string())
    no_date = pyarrow.array([2**50], pyarrow.timestamp("ms"))
    for column in (no_text, no_date):
        pyarrow.parquet.write_table(pyarrow.table({"input": column}), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=says(tmp_path / "a.parquet")):
            read_records(tmp_path / "a.parquet")
