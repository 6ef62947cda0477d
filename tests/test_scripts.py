"""run.sh, run_recipe.sh and setup.sh in a small project named troupe, and the verdict of prove.sh."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.messages import says

ROOT = Path(__file__).resolve().parents[1]
RUN_SH = ROOT / "recipes" / "sft" / "run.sh"
MAIN = (
    "import os, sys\n"
    "from . import config\n"
    "print([__package__, os.getcwd(), sys.argv[1:], os.environ['TROUPE_HOME']])\n"
    "sys.exit(7 if 'fail' in sys.argv else 0)\n"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project named troupe in a folder with a space, with one recipe that prints its arguments."""
    home = tmp_path / "my project"
    shutil.copytree(ROOT / "scripts", home / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (home / "pyproject.toml").write_text('[project]\nname = "troupe"\n')
    (home / "core").mkdir()
    (home / "core" / "__init__.py").touch()
    make_recipe(home / "recipes" / "toy")
    return home


def make_recipe(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.py").touch()
    (folder / "main.py").write_text(MAIN)
    shutil.copy(RUN_SH, folder / "run.sh")
    return folder


def bash(script: Path, *arguments: str, cwd: Path | str = "/", **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script with an environment that consists of the arguments."""
    bare = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "TROUPE_PYTHON": sys.executable}
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, cwd=cwd, env=bare | env, capture_output=True, text=True, timeout=500)


def test_run_sh_runs_its_folder_from_any_directory_with_unchanged_arguments(project: Path, tmp_path: Path) -> None:
    # A folder with its own module named core must not have an effect.
    (tmp_path / "core.py").write_text("raise SystemExit('the wrong core')")
    done = bash(project / "recipes" / "toy" / "run.sh", "a b", "--x", "$c", "", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{['recipes.toy', str(tmp_path), ['a b', '--x', '$c', ''], str(project)]}\n"


def test_run_sh_ends_with_the_exit_code_of_the_recipe(project: Path) -> None:
    assert bash(project / "recipes" / "toy" / "run.sh", "fail").returncode == 7


def test_a_recipe_elsewhere_is_imported_by_name_with_the_project_in_troupe_home(project: Path, tmp_path: Path) -> None:
    run_sh = make_recipe(tmp_path / "her work" / "algo") / "run.sh"
    done = bash(run_sh, TROUPE_HOME=os.path.relpath(project, tmp_path), cwd=tmp_path)
    assert done.stdout == f"{['algo', str(tmp_path), [], str(project)]}\n", done.stderr


def test_a_troupe_home_without_the_project_is_refused(tmp_path: Path) -> None:
    done = bash(make_recipe(tmp_path / "algo") / "run.sh", TROUPE_HOME=str(tmp_path))
    assert done.returncode == 2
    assert re.search(says(tmp_path, "TROUPE_HOME"), done.stderr)


@pytest.mark.parametrize(
    ("place", "facts"),
    [
        ("recipes/my-algo", ('"my-algo"', "_")),
        ("recipes/2nd", ('"2nd"', "_")),
        ("recipes/lambda", ("recipes.lambda", "word")),
        ("other/json", ("json", "module", json.__file__)),
        ("other/core", ("core", "module", "core/__init__.py")),
    ],
)
def test_a_folder_with_an_invalid_module_name_is_refused(project: Path, place: str, facts: tuple[str, ...]) -> None:
    done = bash(make_recipe(project / place) / "run.sh")
    assert done.returncode == 2
    assert re.search(says(project / place, *facts), done.stderr)
    assert "Traceback" not in done.stderr


def test_setup_without_python_names_the_package_to_install_and_creates_nothing(project: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "cat", "dirname", "flock", "sed", "sha256sum", "timeout"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    done = bash(project / "scripts" / "setup.sh", PATH=str(tools), HOME=str(tmp_path))
    assert done.returncode == 2
    assert re.search(says("3.11", "3.12", "apt install python3.11", "--python PATH"), done.stderr)
    assert not (project / ".venv").exists()


def test_setup_lists_the_extras_if_one_is_unknown(project: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", project)
    done = bash(project / "scripts" / "setup.sh", "--python", sys.executable, "vision")
    assert done.returncode == 2
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert re.search(says("'vision'", "base", *extras), done.stderr)
    assert not (project / ".venv").exists()


def prove(
    folder: Path, ends: dict[str, float], control_end: float = 0.2, recipe: str = "openrlhf_ppo"
) -> subprocess.CompletedProcess[str]:
    """Return the verdict on runs that start at 0.2 and end at the arguments, and a control with learning rate 0."""
    folder.mkdir(exist_ok=True)
    for name, end in {**ends, "lr-0": control_end}.items():
        score = {"start": 0.2, "end": end, "start_greedy": 0.1, "end_greedy": 0.1, "examples": 2048}
        summary = {"status": "finished", "score": score, "seconds": {"training": 61.4}, "peak_memory_bytes": 2**31}
        (folder / name).mkdir()
        (folder / name / "summary.json").write_text(json.dumps(summary))
    command = [sys.executable, str(ROOT / "scripts" / "prove_table.py"), str(folder), recipe]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def failures(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the missed thresholds of a verdict."""
    return [line for line in done.stdout.splitlines() if line.startswith("FAIL ")]


def test_three_seeds_above_all_thresholds_pass(tmp_path: Path) -> None:
    done = prove(tmp_path, {"seed-1": 0.72, "seed-2": 0.75, "seed-3": 0.78})
    assert done.returncode == 0, done.stdout
    assert "seed-1 finished 0.200 0.720 0.520 0.100 0.100 61 2.0" in " ".join(done.stdout.split())
    assert done.stdout.count("\npass ") == 5


@pytest.mark.parametrize(
    ("recipe", "least_mean", "lowest"),
    [
        ("grpo", 0.8, 0.77),
        ("reinforce_pp", 0.75, 0.72),
        ("openrlhf_ppo", 0.75, 0.72),
        ("multi_turn", 0.7, 0.67),
        ("verl_ppo", 0.75, 0.72),
    ],
)
def test_each_recipe_has_its_own_threshold(tmp_path: Path, recipe: str, least_mean: float, lowest: float) -> None:
    done = prove(tmp_path, {"seed-1": lowest, "seed-2": least_mean, "seed-3": least_mean + 0.03}, recipe=recipe)
    assert done.returncode == 0, done.stdout
    assert re.search(rf"^pass .*\b{least_mean}$", done.stdout, re.MULTILINE)
    missed = prove(tmp_path / "below", {"seed-1": lowest - 0.001, "seed-2": 1.0}, recipe=recipe)
    (fault,) = failures(missed)
    assert re.search(says(f"{lowest - 0.001:.3f}", lowest), fault)


def test_a_recipe_without_a_threshold_is_refused(project: Path) -> None:
    for arguments in (["--recipe", "sft"], ["--recipe"], ["--recipe", "nowhere", "1"]):
        done = bash(project / "scripts" / "prove.sh", *arguments)
        assert done.returncode == 2, done.stdout
        recipes = ("openrlhf_ppo", "grpo", "reinforce_pp", "multi_turn", "verl_ppo")
        assert re.search(says("--recipe", *recipes), done.stderr)
    done = bash(project / "scripts" / "prove.sh", "--recipe", "grpo", "one")
    assert done.returncode == 2
    assert re.search(says("seed", '"one"'), done.stderr)
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    ("recipe", "still"),
    [
        ("grpo", "train.learning_rate=0"),
        ("verl_ppo", "actor_rollout_ref.actor.optim.lr=0 critic.optim.lr=0"),
    ],
)
def test_prove_runs_the_recipe_for_each_seed_and_once_without_learning(project: Path, recipe: str, still: str) -> None:
    (project / "recipes" / recipe).mkdir()
    (project / "recipes" / recipe / "run.sh").write_text('echo "called: $*"\n')
    venv = project / ".venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "python").symlink_to(sys.executable)
    proof = project / "proof"
    done = bash(project / "scripts" / "prove.sh", "--recipe", recipe, "4", "7", PROVE_DIR=str(proof))
    assert [line for line in done.stdout.splitlines() if line.startswith("called")] == [
        f"called: run_dir={proof}/seed-4 seed=4",
        f"called: run_dir={proof}/seed-7 seed=7",
        f"called: run_dir={proof}/lr-0 seed=4 {still}",
    ]
    assert done.returncode == 1  # no summary exists


@pytest.mark.parametrize(
    ("ends", "control_end", "failed"),
    [
        ({"seed-1": 0.72, "seed-2": 0.75, "seed-3": 0.75}, 0.2, [("mean final score", "0.740", 0.75)]),
        ({"seed-1": 0.71, "seed-2": 0.9, "seed-3": 0.9}, 0.2, [("lowest", "0.710", 0.72)]),
        (
            {"seed-1": 0.59},
            0.2,
            [("mean final score", "0.590", 0.75), ("lowest", "0.590", 0.72), ("mean improvement", "0.390")],
        ),
        ({"seed-1": 0.8}, 0.203, [("learning rate 0", "+0.0030")]),
    ],
)
def test_a_missed_threshold_is_reported_with_its_value(
    tmp_path: Path, ends: dict[str, float], control_end: float, failed: list[tuple[object, ...]]
) -> None:
    done = prove(tmp_path, ends, control_end)
    assert done.returncode == 1
    for facts, miss in zip(failed, failures(done), strict=True):
        assert re.search(says(*facts), miss)


def test_a_run_without_a_summary_fails(tmp_path: Path) -> None:
    (tmp_path / "seed-2").mkdir()
    done = prove(tmp_path, {"seed-1": 0.8})
    assert done.returncode == 1
    assert len(failures(done)) == 1
    assert re.search(r"seed-2 +.*summary\.json", done.stdout)
