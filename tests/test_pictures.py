"""The pictures of the documentation are made by a script, and show the current output of a run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipe_copies import ROOT

PNG = b"\x89PNG\r\n\x1a\n"


def words(screen: str) -> set[str]:
    """The words of the printed plan, without numbers, plurals of "thread" and values of options."""
    plan = " ".join(line.partition(":")[2] for line in screen.splitlines() if line.startswith("grpo:"))
    return set(re.findall(r"[a-z_]{3,}(?:\.[a-z_]+)?", re.sub(r"=\S+", "=", plan).replace("threads", "thread")))


@pytest.mark.nightly
def test_pictures_are_made_from_a_run_and_those_of_the_docs_are_current(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "pictures.py"), "--out", str(tmp_path), "max_steps=3"]
    env = os.environ | {"TROUPE_PYTHON": sys.executable}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("terminal", "report", "rollouts"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
    text = (tmp_path / "terminal.txt").read_text()
    assert re.search(r"step [123] of 3", text)
    assert "reward/score" in text
    shown = words((ROOT / "docs" / "images" / "terminal.txt").read_text())
    stale = shown - words(text)
    assert not stale, f"docs/images show {sorted(stale)}, a run does not: python scripts/pictures.py"
