"""Tests of README.md and of the pages on core: their commands and code run unchanged."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import core
from tests.recipe_copies import RECIPES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run_file(file: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `python FILE` in its folder."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | more
    command = [sys.executable, file.name]
    return subprocess.run(command, cwd=file.parent, env=env, capture_output=True, text=True, timeout=500)


def test_the_readme_has_a_row_for_each_recipe_and_links_every_kind_of_page() -> None:
    for recipe in RECIPES:
        assert f"| [{recipe}](recipes/{recipe}/README.md) |" in README
    for name in ("index", "own_data", "make_your_own", "howto", "trust", "gpu", "from_trl", "option_names"):
        assert f"docs/{name}.md" in README


SHOWN = [("core", "hello.py"), ("core", "shop.py"), ("core_migration", "moved.py")]
"""Jobs on the pages about core that can be run, and their pages."""


def page(name: str) -> str:
    """Return a page of docs/."""
    return (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")


def shown_jobs(name: str) -> dict[str, str]:
    """Return the files that a page shows completely."""
    blocks = re.findall(r"```python\n# file: (\S+)\n(.*?)```", page(name), re.DOTALL)
    return dict(blocks)


def test_every_file_shown_on_the_pages_of_core_is_run() -> None:
    assert [(name, file) for name in ("core", "core_migration") for file in shown_jobs(name)] == SHOWN
    assert sum(page(name).count("```python") for name in ("core", "core_migration")) == len(SHOWN)


@pytest.mark.parametrize("backend", [pytest.param("ray", marks=pytest.mark.full), "local"])
@pytest.mark.parametrize(("name", "file"), SHOWN)
def test_jobs_on_the_pages_of_core_run_unchanged_with_the_shown_output(
    tmp_path: Path, name: str, file: str, backend: str, request: pytest.FixtureRequest
) -> None:
    env = {"RAY_ADDRESS": request.getfixturevalue("ray_address")} if backend == "ray" else {}
    code, changed = re.subn(r'submit\("(\w+)"\)', rf'submit("\1", backend="{backend}")', shown_jobs(name)[file])
    assert changed == 1
    (tmp_path / file).write_text(code)
    said = re.search(rf"`python {file}` prints `([^`]+)` and `([^`]+)`", page(name))
    assert said is not None
    done = run_file(tmp_path / file, **env)
    # On a busy machine, lines about waiting may precede the expected ones.
    lines = [line for line in done.stdout.splitlines() if line in (said[1], said[2])]
    assert lines == [said[1], said[2]], done.stdout + done.stderr


def test_names_listed_as_kept_by_the_migration_page_exist() -> None:
    text = page("core_migration")
    kept = re.search(r"\nKept: (.*?)\n\n", text, re.DOTALL)
    assert kept is not None
    names = {*dir(core), *core.BaseTrainer.__annotations__, *core.RoleSpec.model_fields, "config"}
    names.update(*map(dir, (core.BaseTrainer, core.RoleSpec)))
    names.update(re.findall(r"(\w+): ", inspect.getdoc(core.BaseWorkload) or ""))
    names.update(inspect.signature(core.BaseTrainer).parameters)
    for name in re.findall(r"`@?(?:job.workloads\[role\]\.)?(\w+)", kept[1]):
        assert name in names, f"docs/core_migration.md says that {name} is kept"


MOST_FILES = {"grpo": 6, "multi_turn": 6, "reinforce_pp": 6, "distill": 6, "openrlhf_ppo": 10, "verl_ppo": 10}


@pytest.mark.parametrize("recipe", MOST_FILES)
def test_a_step_uses_few_files_and_the_names_in_the_readme_exist(recipe: str) -> None:
    folder = ROOT / "recipes" / recipe
    text = (folder / "README.md").read_text(encoding="utf-8").partition("## One step, from prompt to weights")[2]
    rows = re.search(r"\|---\|---\|\n((?:\|.*\n)+)", text)
    assert rows is not None
    files: set[Path] = set()
    path = folder
    for row in rows[1].splitlines():
        for name in re.findall(r"`([\w/.]+)`", row.split("|")[1]):
            if name.endswith(".py"):
                path = next(p for p in (folder / name, ROOT / name) if p.is_file())
                files.add(path)
            else:
                assert f"def {name}(" in path.read_text(encoding="utf-8"), f"{path} has no {name}"
    assert 5 <= len(files) <= MOST_FILES[recipe]
