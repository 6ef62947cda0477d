"""The sandbox: resource limits, isolation, and removal of all processes of a program."""

import asyncio
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plugins.sandbox import sandbox
from plugins.sandbox.sandbox import Limits, SandboxResult, run_python, run_python_async
from tests.messages import says

PROJECT = Path(__file__).resolve().parents[3]
IS_ISOLATED = not sandbox.isolation_fault()
"""True if programs can be isolated on this machine. Otherwise the tests run with TROUPE_SANDBOX=unsafe."""


def processes_with(mark: str) -> list[str]:
    """Return the command lines of running processes that contain `mark`."""
    folders = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in line:
            folders.append(line)
    return folders


def wait_until_gone(mark: str) -> None:
    """Wait until all of these processes have ended."""
    while processes_with(mark):
        time.sleep(0.02)


def test_a_program_reads_stdin_and_its_output_and_exit_code_are_returned() -> None:
    program = "import sys\nprint(sum(map(int, input().split())))\nprint('ü', file=sys.stderr)\nsys.exit(7)"
    result = run_python(program, "1 2 3\n")
    assert result == SandboxResult("6\n", "ü\n", 7, "", IS_ISOLATED)
    assert result.text == "6\nü"
    assert run_python("raise SystemExit(200)").text == "exit code 200"


def test_a_traceback_has_no_path_of_the_working_directory() -> None:
    program = "import os\nprint(os.getcwd(), os.listdir(), __file__)\n1 / 0"
    first = run_python(program)
    second = run_python(program)
    assert first == second
    assert first.stdout == ". ['main.py'] main.py\n"
    assert first.stderr.splitlines()[1:3] == ['  File "main.py", line 3, in <module>', "    1 / 0"]
    assert first.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_an_endless_loop_ends_at_its_cpu_limit_and_its_output_is_kept() -> None:
    result = run_python("print('on', flush=True)\nwhile True: pass", limits=Limits(cpu_s=1, timeout_s=600))
    assert (result.stdout, result.exit) == ("on\n", -signal.SIGXCPU)
    assert re.search(says("1 s", "CPU"), result.reason)


@pytest.mark.full
def test_a_program_that_ignores_the_first_signal_is_killed() -> None:
    program = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    result = run_python(program, limits=Limits(cpu_s=1, timeout_s=600))
    assert result.exit == -signal.SIGKILL
    assert re.search(says("1 s", "CPU"), result.reason)


def test_a_sleeping_program_ends_at_its_wall_time_limit() -> None:
    result = run_python("import time\nwhile True: time.sleep(9)", limits=Limits(timeout_s=1))
    assert result.exit == -signal.SIGKILL
    assert "1 s" in result.reason
    assert "CPU" not in result.reason


def test_a_program_may_kill_its_process_group() -> None:
    for program in ("import os\nos.kill(0, 9)", "import os\nos.abort()"):
        result = run_python(program)
        name = {-9: "SIGKILL", -6: "SIGABRT"}[result.exit]
        assert name in result.reason


def test_an_allocation_of_2_gib_fails_and_one_of_100_mib_does_not() -> None:
    assert "MemoryError" in run_python("bytearray(2**31)").stderr
    assert run_python("print(len(bytearray(100 * 2**20)))").stdout == "104857600\n"


def test_writing_stops_at_the_limit_of_a_file() -> None:
    program = "f = open('a', 'wb', buffering=0)\nprint(f.write(b'x' * 5000))\nf.write(b'x')"
    result = run_python(program, limits=Limits(file_bytes=3000))
    assert result.stdout == "3000\n"
    assert "File too large" in result.stderr


def test_endless_output_ends_the_program_with_a_reason() -> None:
    result = run_python("while True: print('x' * 99)", limits=Limits(file_bytes=10_000, max_output=50))
    assert result.stdout == f"{'x' * 50}\n... (10000 characters, cut after 50)"
    assert re.search(says("10000 bytes"), result.reason)
    assert result.exit == -signal.SIGKILL


def test_output_of_exactly_the_limit_is_kept() -> None:
    limits = Limits(file_bytes=10_000, max_output=10_000)
    result = run_python("import os\nos.write(1, b'x' * 10_000)\nos.write(2, b'y' * 10_000)", limits=limits)
    assert result == SandboxResult("x" * 10_000, "y" * 10_000, 0, "", IS_ISOLATED)


def test_a_killed_parent_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without namespaces, a program has a folder on the disk, which a later program removes."""
    code = "import asyncio, sys\nfrom plugins.sandbox.sandbox import *\nfrom plugins.sandbox.sandbox import run_now\n"
    code += "program = 'print(1, flush=True)\\nwhile True: pass'\n"
    code += "asyncio.run(run_now(program, '', Limits(timeout_s=3600, cpu_s=60), isolate=sys.argv[1] == 'True'))"
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(PROJECT)}
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for is_isolated in sorted({False, IS_ISOLATED}, reverse=True):
        parent = subprocess.Popen([sys.executable, "-c", code, str(is_isolated)], env=env)
        while not any("main.py" in line and str(parent.pid) in line for line in processes_with("sandbox_child.py")):
            time.sleep(0.02)
            # Only entries of this name: tempfile writes a file for a moment to check whether the folder is writable.
            if not is_isolated and list(tmp_path.glob("*/main.py")):
                break
        parent.kill()
        parent.wait()
        assert len(list(tmp_path.iterdir())) == (not is_isolated)
    # A parent that is killed while it starts the program leaves a copy of itself, which holds the lock until it ends.
    deadline = time.monotonic() + 60
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, list(tmp_path.iterdir())
        asyncio.run(sandbox.run_now("pass", "", Limits(timeout_s=60), isolate=False))


def test_there_is_no_network() -> None:
    result = run_python("import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=5)")
    assert result.is_isolated == IS_ISOLATED
    assert ("Network is unreachable" in result.stderr) == IS_ISOLATED


def test_the_environment_has_no_variables_of_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    result = run_python("import os\nprint(sorted(os.environ))")
    assert result.stdout == "['HOME', 'LC_CTYPE', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'TMPDIR']\n"


def test_no_child_process_is_left_even_in_a_new_session() -> None:
    mark = f"left-{os.getpid()}"
    # Without namespaces a process in another session cannot be ended, as the docstring of the class says.
    start = f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)', '{mark}', str(own)], "
    sessions = [False, True] if IS_ISOLATED else [False]
    program = f"import subprocess, sys\nfor own in {sessions}:\n  {start}start_new_session=own)"
    assert run_python(program).exit == 0
    wait_until_gone(mark)


def test_cancelling_the_caller_ends_the_program() -> None:
    mark = f"cancelled-{os.getpid()}"
    program = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(99)', '{mark}'])"

    async def cancel() -> None:
        task = asyncio.create_task(run_python_async(program))
        while not processes_with(mark):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    wait_until_gone(mark)


def test_a_program_ends_with_the_process_that_waits_for_it(tmp_path: Path) -> None:
    mark = f"orphan-{os.getpid()}"
    # Forked processes end too, if there are namespaces. Elsewhere they would not, as the docstring of the class says.
    program = f"import os, sys\nif {IS_ISOLATED} and os.fork() == 0: os.setsid()\n"
    program += f"os.execv(sys.executable, [sys.executable, '-c', 'import time\\nwhile True: time.sleep(9)', {mark!r}])"
    code = f"from plugins.sandbox.sandbox import *\nrun_python({program!r}, limits=Limits(timeout_s=3600))"
    (tmp_path / "parent.py").write_text(code)
    # The killed parent leaves its folder, which is removed with that of the test.
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(PROJECT)}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], env=env)
    while len(processes_with(mark)) < 1 + IS_ISOLATED:
        assert parent.poll() is None
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    wait_until_gone(mark)


def test_many_programs_run_at_the_same_time() -> None:
    async def all_at_once() -> list[SandboxResult]:
        return await asyncio.gather(*(run_python_async(f"print({i})") for i in range(16)))

    assert [result.stdout for result in asyncio.run(all_at_once())] == [f"{i}\n" for i in range(16)]


def test_programs_wait_for_a_free_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_places", threading.BoundedSemaphore(1))
    program = "import time\nprint(time.monotonic())\ntime.sleep(0.1)\nprint(time.monotonic())"

    def run() -> list[float]:
        return [float(line) for line in run_python(program, limits=Limits(timeout_s=60)).stdout.split()]

    # From threads with separate event loops.
    with ThreadPoolExecutor(4) as pool:
        spans = sorted(future.result() for future in [pool.submit(run) for _ in range(4)])
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


@pytest.mark.full
def test_the_time_limit_begins_when_the_slot_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    places = threading.BoundedSemaphore(1)
    monkeypatch.setattr(sandbox, "_places", places)
    limits = Limits(timeout_s=10)
    with ThreadPoolExecutor(1) as pool:
        with places:
            waiting = pool.submit(run_python, "print(1)", limits=limits)
            time.sleep(limits.timeout_s + 1)
        assert (waiting.result().stdout, waiting.result().reason) == ("1\n", "")


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a system that forbids namespaces: the program that creates them does not exist."""
    monkeypatch.setattr(sandbox, "isolation_fault", lambda: "unshare: Operation not permitted")


def test_without_namespaces_no_program_runs(forbidden: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TROUPE_SANDBOX", raising=False)
    with pytest.raises(sandbox.SandboxError, match=says("unshare", "TROUPE_SANDBOX=unsafe")):
        run_python("print(1)")


def test_an_unsafe_run_gives_one_warning_and_a_mark_in_the_result(
    forbidden: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TROUPE_SANDBOX", "unsafe")
    sandbox._warn.cache_clear()
    results = [run_python("print(1)") for _ in range(2)]
    assert [(result.stdout, result.is_isolated) for result in results] == [("1\n", False)] * 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert re.search(says("unshare", "network", "files"), caplog.text)


@pytest.mark.parametrize("wrong", [{"cpu_s": 0}, {"timeout_s": 0.0}, {"memory_bytes": -1}, {"max_output": 0}])
def test_invalid_limits_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        Limits(**wrong)
