"""A run prints and writes any text, for any encoding of its terminal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from recipe_runs import ROOT

from components.process.streams import accept_any_text

REWARD = """def reward_func(queries, prompts, labels, **_):
    print("\\U0001f600 \\ud800")
    return [1.0] * len(queries)
"""
OPTIONS = ["backend=local", "max_steps=1", "evaluation.path=null", "prompts_per_step=16", "data.max_samples=16"]


def program(*arguments: str, **env: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        timeout=300,
        check=False,
    )


def test_characters_missing_from_an_encoding_are_written_as_escapes() -> None:
    code = f"from {accept_any_text.__module__} import *; accept_any_text(); print('é \\U0001f600 \\ud800')"
    shown = {name: program("-c", code, PYTHONIOENCODING=name).stdout for name in ("ascii", "latin-1", "utf-8")}
    assert shown == {
        "ascii": b"\\xe9 \\U0001f600 \\ud800\n",
        "latin-1": b"\xe9 \\U0001f600 \\ud800\n",
        "utf-8": "é \U0001f600 \\ud800\n".encode(),
    }


def test_an_ascii_terminal_shows_emojis_of_names_and_user_code_as_escapes(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    run_dir = tmp_path / "run \U0001f600"
    arguments = [f"run_dir={run_dir}", f"reward.source={tmp_path}/reward.py", *OPTIONS]
    done = program("-m", "recipes.grpo.main", *arguments, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert f"run folder {tmp_path}/run \\U0001f600".encode() in done.stdout
    assert b"\\U0001f600 \\ud800" in done.stderr  # the process of the reward writes there
    assert (run_dir / "report.html").is_file()
    report = program(str(ROOT / "scripts/report.py"), str(run_dir), PYTHONIOENCODING="ascii")
    assert (report.returncode, b"\\U0001f600" in report.stdout) == (0, True)


@pytest.mark.parametrize("env", [{}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}])
def test_an_argument_with_invalid_utf8_is_refused_by_name(tmp_path: Path, env: dict[str, str]) -> None:
    name = b"\xff" if not env else "\U0001f600".encode()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "recipes.sft.main", b"run_dir=" + bytes(tmp_path) + b"/" + name],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    (line,) = done.stderr.splitlines()
    assert line.startswith(b"sft: run_dir=")
    assert b"LC_ALL=C.UTF-8" in line
    assert list(tmp_path.iterdir()) == []
