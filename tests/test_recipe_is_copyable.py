"""A copied recipe folder is a recipe of its own: it runs itself, not the original, wherever it lies."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPES = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/run.sh"))

ONE_STEP = {
    "openrlhf_ppo": ["max_samples=16", "rollout_batch_size=16", "n_samples_per_prompt=2", "train_batch_size=32"],
    "sft": ["max_samples=96", "train_batch_size=32", "eval_samples=64"],
}
"""What makes a recipe's tiny preset stop after one step."""


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> str:
    """Each recipe that there is."""
    return request.param


@pytest.fixture
def inside(recipe: str) -> Iterator[Path]:
    """A copy under a new name inside the repository's recipes."""
    target = ROOT / "recipes" / f"copied_{recipe}"
    shutil.copytree(ROOT / "recipes" / recipe, target, ignore=shutil.ignore_patterns("__pycache__"))
    yield target
    shutil.rmtree(target)


@pytest.fixture
def outside(recipe: str, tmp_path: Path) -> Path:
    """A copy in a folder that knows nothing of the repository."""
    target = tmp_path / "my work" / "my_algo"
    shutil.copytree(ROOT / "recipes" / recipe, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def run(folder: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`bash run.sh options` from another directory, with nothing in the environment that helps."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TROUPE_HOME")}
    return subprocess.run(
        ["bash", str(folder / "run.sh"), *options],
        cwd=folder.parent,
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=110,
    )


def entrypoints(done: subprocess.CompletedProcess[str]) -> set[str]:
    """The packages from which the plan takes its roles."""
    assert done.returncode == 0, done.stderr
    roles = json.loads(done.stdout)["roles"].values()
    return {role["entrypoint"].split(":")[0].removesuffix(".trainer").split(".roles")[0] for role in roles}


def test_a_copy_inside_the_repository_plans_its_own_roles(inside: Path) -> None:
    assert entrypoints(run(inside, "--dry_run")) == {f"recipes.{inside.name}"}


def test_a_copy_elsewhere_plans_its_own_roles(outside: Path) -> None:
    assert entrypoints(run(outside, "--dry_run", TROUPE_HOME=str(ROOT))) == {"my_algo"}


def test_a_copy_elsewhere_runs_what_was_changed_in_it(recipe: str, outside: Path, tmp_path: Path) -> None:
    algorithm = outside / "algorithm.py"
    changed = algorithm.read_text().replace("return list(", 'print("CHANGED")\n    return list(')
    changed = changed.replace("    order: list[Tensor] = []", '    print("CHANGED")\n    order: list[Tensor] = []')
    assert changed.count("CHANGED") == 1
    algorithm.write_text(changed)
    run_dir = tmp_path / "run"
    done = run(outside, f"run_dir={run_dir}", *ONE_STEP[recipe], TROUPE_HOME=str(ROOT))
    assert done.returncode == 0, done.stderr + done.stdout
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["recipe"], summary["status"], summary["steps"]) == ("my_algo", "finished", 1)
    assert any("CHANGED" in log.read_text() for log in (run_dir / "logs").glob("*.log"))


def test_a_folder_whose_name_is_no_identifier_is_refused_clearly(outside: Path) -> None:
    renamed = outside.rename(outside.with_name("my-algo"))
    done = run(renamed, "--dry_run", TROUPE_HOME=str(ROOT))
    assert done.returncode == 2
    assert "my-algo" in done.stderr


def test_a_copy_that_cannot_find_the_project_says_what_to_do(outside: Path, tmp_path: Path) -> None:
    # A PATH without any Python in which `core` of this project could be imported.
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "basename", "grep", "sed"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    done = run(outside, "--dry_run", PATH=str(tools))
    assert done.returncode == 2
    assert "TROUPE_HOME" in done.stderr
    assert done.stderr.count("\n") == 1
