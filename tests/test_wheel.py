"""The wheel installs one import name, runs without a clone, and has its version from one place."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import core
from tests.messages import says

ROOT = Path(__file__).resolve().parents[1]
STRANGER = "Another project's package, as openai-agents installs one."


def load_setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_of_troupe", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SETUP = load_setup()
PACKAGES: list[str] = SETUP.top_level_packages()
MODULES = {"core", "core.job", "training", "plugins.report", "training.roles", "training.roles.rollout", "agents"}


def rewritten(source: str) -> str:
    return SETUP.Rewriter(MODULES).rewritten(source.encode(), "file.py").decode()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import core", "from troupe import core"),
        ("import core as c", "import troupe.core as c"),
        ("import core.job", "import troupe.core.job; from troupe import core"),
        ("import os, core, agents as a", "import os; from troupe import core; import troupe.agents as a"),
        ("if x: import core.job as j", "if x: import troupe.core.job as j"),
        ("from core import (\n    Job,  # γ\n    Role,\n)", "from troupe.core import (\n    Job,  # γ\n    Role,\n)"),
        ("γ = 1; from core.job import Job", "γ = 1; from troupe.core.job import Job"),
        ("from core_tools import x", "from core_tools import x"),
        ("from ..core import x", "from ..core import x"),
    ],
)
def test_imports_of_our_packages_get_the_prefix_and_bind_the_same_names(source: str, expected: str) -> None:
    assert rewritten(source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"training.roles.rollout:Worker"', '"troupe.training.roles.rollout:Worker"'),
        ('"python -m plugins.report RUN"', '"python -m troupe.plugins.report RUN"'),
        ('f"{core.job} plugins.report {x}"', 'f"{core.job} troupe.plugins.report {x}"'),
        ('f"{{core.job}} {agents}"', 'f"{{troupe.core.job}} {agents}"'),
        ('name.startswith("core.")', 'name.startswith("troupe.core.")'),
        ("# see `plugins.report`", "# see `troupe.plugins.report`"),
        ('"""\nwrite `from agents import Tool`\n"""', '"""\nwrite `from troupe.agents import Tool`\n"""'),
    ],
)
def test_names_of_existing_modules_in_text_get_the_prefix(source: str, expected: str) -> None:
    assert rewritten(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "plugins.report(x)",  # an attribute of a variable
        '"training.global_step"',  # not a module
        '"core"',
        '"plugins/report.py"',
        '"my.core.job"',
        '"from training data"',
        'x["agents"]',
    ],
)
def test_other_code_and_text_is_unchanged(source: str) -> None:
    assert rewritten(source) == source


def test_a_new_top_level_package_of_pyproject_is_included_as_soon_as_its_folder_exists(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert SETUP.top_level_packages(tmp_path) == []
    for name in ("plugins", "core", "docs"):
        (tmp_path / name).mkdir()
    assert SETUP.top_level_packages(tmp_path) == ["core", "plugins"]


def test_the_version_is_that_of_the_citation_and_has_an_entry_in_the_changelog() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == core.__version__
    assert f"\n## {core.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_package_is_marked_as_typed() -> None:
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").is_file()] == []


@dataclass
class Installed:
    """An environment with the wheel and a foreign package `agents`, in an empty working directory."""

    wheel: Path
    folder: Path

    def python(self, *arguments: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # Without a separate cache the run would use the warm-start model of another test.
        environment |= {"TROUPE_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1"}
        command = [str(self.folder / "venv" / "bin" / "python"), *arguments]
        work = self.folder / "work"
        return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=timeout_s)


def build(kind: str, source: Path, target: Path) -> Path:
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(target)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel built from the sdist of this tree, unpacked into a new virtual environment."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / "clone" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "constraints.txt",
    ):
        shutil.copy(ROOT / name, folder / "clone")
    sdist = build("sdist", folder / "clone", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    wheel = build("wheel", source, folder)

    base: str = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (site,) = folder.glob("venv/lib/python3.*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "agents").mkdir()
    (site / "agents" / "__init__.py").write_text(f"OWNER = {STRANGER!r}\n")
    # The libraries of this environment. Its .pth files, such as that of an editable install, are not processed.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "work").mkdir()
    return Installed(wheel, folder)


@pytest.mark.full
def test_the_wheel_has_one_import_name_and_every_file_of_the_packages(installed: Installed) -> None:
    info = f"troupe-{core.__version__}.dist-info"
    with zipfile.ZipFile(installed.wheel) as archive:
        names = set(archive.namelist())
        assert archive.read(f"{info}/top_level.txt") == b"troupe\n"
        for name in ("plugins/option_help/synonyms.yaml", "core/migration.csv", "recipes/grpo/run.sh", "core/py.typed"):
            assert archive.read(f"troupe/{name}") == (ROOT / name).read_bytes()
    assert {name.partition("/")[0] for name in names} == {"troupe", info}
    tracked = {f"troupe/{path}" for path in SETUP.files_of(ROOT, PACKAGES)}
    assert {name for name in names if name.startswith("troupe/")} == tracked | {
        "troupe/__init__.py",
        "troupe/py.typed",
    }
    assert {Path(name).suffix for name in tracked} >= {".yaml", ".csv", ".css", ".js", ".html", ".sh", ".md"}


@pytest.mark.full
def test_the_wheel_leaves_the_generic_names_to_other_projects(installed: Installed) -> None:
    code = """
import importlib.util, json, agents, troupe
from troupe.core import BaseTrainer
taken = [name for name in ("core", "components", "training", "recipes", "plugins") if importlib.util.find_spec(name)]
print(json.dumps([agents.OWNER, troupe.__version__, BaseTrainer.__module__, taken]))
"""
    done = installed.python("-c", code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [STRANGER, core.__version__, "troupe.core.trainer", []]


@pytest.mark.full
def test_a_dry_run_works_and_every_module_of_the_wheel_compiles(installed: Installed) -> None:
    done = installed.python("-m", "troupe.recipes.grpo.main", "--dry_run")
    assert done.returncode == 0, done.stderr
    roles = json.dumps(json.loads(done.stdout))
    assert "troupe.training.roles.rollout:RolloutWorker" in roles
    assert '"training.roles' not in roles
    (site,) = installed.folder.glob("venv/lib/python3.*/site-packages")
    done = installed.python("-m", "compileall", "-q", str(site / "troupe"))
    assert done.returncode == 0, done.stdout


@pytest.mark.full
def test_a_copied_recipe_outside_of_the_wheel_imports_troupe(installed: Installed) -> None:
    (recipe,) = installed.folder.glob("venv/lib/python3.*/site-packages/troupe/recipes/grpo")
    shutil.copytree(recipe, installed.folder / "work" / "my_algo")
    trainer = installed.folder / "work" / "my_algo" / "trainer.py"
    assert "from troupe.core import BaseTrainer" in trainer.read_text()
    done = installed.python("-m", "my_algo.main", "--dry_run")
    assert done.returncode == 0, done.stderr
    assert "my_algo.trainer:" in done.stdout


@pytest.mark.nightly
def test_a_demonstration_runs_from_the_wheel_beside_a_foreign_package_agents(installed: Installed) -> None:
    done = installed.python("-m", "troupe.recipes.grpo.main", "max_steps=2", "run_dir=runs/first")
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout + done.stderr
    assert "warm start of sort: step 150/150" in printed
    run = installed.folder / "work" / "runs" / "first"
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 2
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert (run / "report.html").stat().st_size > 100_000
    assert (run / "checkpoints" / "step_2" / "hf").is_dir()


@pytest.mark.full
def test_agents_and_the_code_scorer_of_the_wheel_work_in_child_processes(installed: Installed) -> None:
    code = """
import json
from troupe.agents.trial import AgentTrial
from troupe.plugins.sandbox.code_tests import code_score
truth = json.dumps({"assert_case": ["assert f(1) == 2", "assert f(2) == 4"]})
print(code_score("", "```python\\ndef f(x): return 2\\n```", truth)["score"])
with AgentTrial("agent.py") as trial:
    print(trial.first_call)
"""
    agent = """
import agents
from troupe.agents import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        return {"observation": agents.OWNER}

    async def step(self, states, **kwargs):
        raise NotImplementedError

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
    (installed.folder / "work" / "agent.py").write_text(agent)
    done = installed.python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0.5", "reset"]


def test_a_rename_that_would_change_code_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SETUP.Rewriter, "_renamed", lambda *_: "1")
    with pytest.raises(ValueError, match=says("file.py", "setup.py")):
        rewritten('x = "core.job"')
