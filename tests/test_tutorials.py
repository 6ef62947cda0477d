"""Tests of the tutorials: their files are written and run."""

import os
import re
import subprocess
import sys
from pathlib import Path

from components.rewards.opening import open_reward
from tests.docs_pages import ROOT, text_of


def files_of(page: str, folder: Path) -> None:
    """Write the Python files that a page shows, by the names in their first lines."""
    for text, name in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", text_of(page), re.DOTALL):
        (folder / name).write_text(text)


def run_python(arguments: list[str], folder: Path) -> str:
    """Return the output of `python ...` with the project importable."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_episode_of_the_tool_tutorial_gives_the_documented_texts(tmp_path: Path) -> None:
    files_of("docs/tool_agent.md", tmp_path)
    prompt, tool, end = run_python(["play.py"], tmp_path).splitlines()
    assert prompt == "How much are two apples?"
    assert re.fullmatch(r"\[\{.*'content': '1.0'\}\] 0.0 False", tool)
    assert end.split() == ["1.0", "True"]


def test_the_reward_of_the_data_tutorial_reads_the_column_it_names(tmp_path: Path) -> None:
    files_of("docs/own_data.md", tmp_path)
    with open_reward(str(tmp_path / "my_reward.py")) as reward:
        rows = [{"columns": {"answer": "12"}}] * 3
        output = reward(["q"] * 3, ["q"] * 3, ["12"] * 3, responses=["so 12", "12, no 13", "none"], rows=rows)
    assert output.reward_B.tolist() == [1, 0, 0]


def test_the_code_of_the_page_on_batch_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", text_of("docs/batch.md"), re.DOTALL)
    printed = run_python(["-c", code], tmp_path).splitlines()
    assert printed[0].startswith("Batch(3 sequences, 9 tokens:")
