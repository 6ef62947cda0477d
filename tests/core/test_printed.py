"""Lines printed by a role are shown at the terminal, up to a limit, and written to its log."""

import json.decoder
import os
import re
from pathlib import Path
from typing import Any

import pytest

from core import JobBuilder
from core.backends import BackendName
from core.printed import PrintedLines, is_library
from tests.messages import says


@pytest.fixture
def stream(tmp_path: Path) -> tuple[PrintedLines, list[str], Path]:
    """Return a stream, the list of lines that it shows, and the path of its log."""
    shown: list[str] = []
    return PrintedLines("ACTOR-0", shown.append, tmp_path / "actor-0.log"), shown, tmp_path / "actor-0.log"


def test_complete_lines_are_shown_with_the_name_of_the_process(stream: Any) -> None:
    printed, shown, log = stream
    print("a", 1, file=printed)
    print("half ", end="", file=printed)
    assert shown == ["ACTOR-0: a 1"]
    print("a line", "two\nlines", sep="; ", file=printed)
    assert shown == ["ACTOR-0: a 1", "ACTOR-0: half a line; two", "ACTOR-0: lines"]
    assert log.read_text() == "a 1\nhalf a line; two\nlines\n"


def test_lines_above_the_limit_are_counted_and_written_to_the_log(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, shown, log = stream
    now = [100.0]
    monkeypatch.setattr("core.printed.time.monotonic", lambda: now[0])
    for number in range(50):
        print(number, file=printed)
    assert shown[:20] == [f"ACTOR-0: {number}" for number in range(20)]
    (limit,) = shown[20:]
    assert re.search(says("ACTOR-0", "20 lines in 10 s", str(log)), limit)
    now[0] += 11
    print("later", file=printed)
    assert shown[21:] == ["ACTOR-0: 30 printed lines were not shown", "ACTOR-0: later"]
    assert log.read_text().splitlines() == [*map(str, range(50)), "later"]
    printed.show_count()
    assert len(shown) == 23


def test_a_long_line_is_truncated_with_the_number_of_missing_characters(stream: Any) -> None:
    printed, shown, log = stream
    print("x" * 2500, file=printed)
    assert shown == [f"ACTOR-0: {'x' * 2000} ... and 500 characters more"]
    assert log.read_text() == "x" * 2500 + "\n"


def test_text_of_libraries_is_written_to_the_log_only(stream: Any, tmp_path: Path) -> None:
    printed, shown, log = stream
    library = tmp_path / "site-packages" / "library.py"
    code = compile("print('from a library', file=stream)", str(library), "exec")
    exec(code, {"stream": printed})
    assert (shown, log.read_text()) == ([], "from a library\n")
    assert is_library(json.decoder.__file__)
    assert not is_library("/usr/src/app/actor.py")
    assert not is_library(__file__)


def test_text_of_a_forked_child_is_written_to_the_log_only(stream: Any) -> None:
    printed, shown, log = stream
    pid = os.fork()
    if pid == 0:
        print("from a child", file=printed)
        os._exit(0 if shown == [] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert log.read_text() == "from a child\n"


def test_stdout_of_a_role_has_a_file_descriptor_and_an_encoding() -> None:
    printed = PrintedLines("ACTOR-0", lambda _: None, None, rest=Path(os.devnull).open("w"))  # noqa: SIM115
    assert printed.fileno() > 0
    assert printed.encoding.lower().startswith("utf")
    printed.flush()


@pytest.mark.parametrize("backend", [pytest.param("ray", marks=pytest.mark.full), "local"])
def test_each_shown_line_names_its_workload_on_both_backends(
    backend: BackendName, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "ray":
        request.getfixturevalue("ray_cluster")
    shown: list[str] = []
    monkeypatch.setattr("core.supervise.master._print_line", shown.append)
    builder = JobBuilder().device_type("CPU")
    builder.role("trainer").run("printing.Trainer").resource(cpu=0.1)
    builder.role("tool").run("printing.Tool").total(2).resource(cpu=0.1)
    builder.role("a").run("printing.Tool").resource(cpu=0.1).process("shared")
    builder.role("b").run("printing.Tool").resource(cpu=0.1).process("shared")
    builder.with_collocation("a", "b")
    result = builder.build().submit("printing", backend=backend, log_dir=tmp_path)
    assert result.status == "finished", result.traceback
    assert {line for line in shown if "tool" in line} == {
        f"{name}: tool" for name in ("TOOL-0", "TOOL-1", "A-0", "B-0")
    }
    assert "TRAINER-0: trains" in shown
    assert "tool\n" in (tmp_path / "tool-1.log").read_text()
    flood = [line for line in shown if "not shown" in line]
    assert flood == ["TRAINER-0: 981 printed lines were not shown"]
    assert "999\n" in (tmp_path / "trainer-0.log").read_text()


def test_lines_are_shown_after_ray_has_replaced_print(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.experimental import tqdm_ray

    printed, shown, _ = stream
    monkeypatch.setattr("builtins.print", tqdm_ray.safe_print)
    print("a", file=printed)
    assert shown == ["ACTOR-0: a"]
