"""What the README shows works as it is written there."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import core
from core.names import old_names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run_file(file: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """`python FILE`, where it lies."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | more
    command = [sys.executable, file.name]
    return subprocess.run(command, cwd=file.parent, env=env, capture_output=True, text=True, timeout=500)


@pytest.mark.full
def test_the_twenty_lines_of_core_run_as_they_stand(tmp_path: Path, ray_address: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my_module.py").write_text(code)
    done = run_file(tmp_path / "my_module.py", RAY_ADDRESS=ray_address)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "6"
    assert "status='finished'" in lines[1]


@pytest.mark.parametrize("backend", [pytest.param("ray", marks=pytest.mark.full), "local"])
def test_the_job_of_the_page_on_core_runs_as_it_stands(
    tmp_path: Path, backend: str, request: pytest.FixtureRequest
) -> None:
    env = {"RAY_ADDRESS": request.getfixturevalue("ray_address")} if backend == "ray" else {}
    page = (ROOT / "docs/core.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "shop.py").write_text(code.replace('submit("shop")', f'submit("shop", backend="{backend}")'))
    done = run_file(tmp_path / "shop.py", **env)
    assert done.stdout == "[2, 1] [30, 50, 40] pear by SCALE-1\nfinished\n", done.stderr
    assert "prints `[2, 1] [30, 50, 40] pear by SCALE-1` and `finished`" in page


def test_the_page_on_core_has_every_name_that_is_not_kept_and_those_that_are_exist() -> None:
    page = (ROOT / "docs/core.md").read_text(encoding="utf-8")
    rows = [f"| {place} | `{name}` | {hint} |" for place, names in old_names().items() for name, hint in names.items()]
    assert page.endswith("\n".join(rows) + "\n")
    kept = re.search(r"\nKept: (.*?)\n\n", page, re.DOTALL)
    assert kept is not None
    names = {*core.__all__, *core.BaseTrainer.__annotations__, *core.RoleSpec.model_fields, "config"}
    names.update(*map(dir, (core.BaseTrainer, core.RoleSpec, core.Identity)))
    names.update(inspect.signature(core.BaseTrainer).parameters)
    for name in re.findall(r"`@?(?:job.workloads\[role\]\.)?(\w+)", kept[1]):
        assert name in names, f"docs/core.md says that {name} is kept"


MOST_FILES = {"grpo": 6, "multi_turn": 6, "reinforce_pp": 6, "openrlhf_ppo": 10, "verl_ppo": 10}


@pytest.mark.parametrize("recipe", MOST_FILES)
def test_a_step_goes_through_few_files_and_what_the_readme_names_in_them_is_there(recipe: str) -> None:
    folder = ROOT / "recipes" / recipe
    text = (folder / "README.md").read_text(encoding="utf-8").partition("## One step, from prompt to weights")[2]
    rows = re.search(r"\|---\|---\|\n((?:\|.*\n)+)", text)
    assert rows is not None
    files, path = set[Path](), folder
    for row in rows[1].splitlines():
        for name in re.findall(r"`([\w/.]+)`", row.split("|")[1]):
            if name.endswith(".py"):
                path = next(p for p in (folder / name, ROOT / name) if p.is_file())
                files.add(path)
            else:
                assert f"def {name}(" in path.read_text(encoding="utf-8"), f"{path} has no {name}"
    assert 5 <= len(files) <= MOST_FILES[recipe]
