"""Tests of scripts/doctor.py on this machine, and on small environments with planted faults."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import packaging
import pytest

from core.shared_memory import machine_id, process_start
from tests.messages import says

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 500
"""Timeout against a hang. The doctor itself stops waiting for a process after 120 s."""
Lines = dict[str, list[dict[str, str]]]
WORKING_TORCH = """
from types import SimpleNamespace
__version__ = "2.13.0+cpu"
cuda = SimpleNamespace(is_available=lambda: False)
version = SimpleNamespace(cuda=None)
ones = lambda n: SimpleNamespace(sum=lambda: n)
"""


class House:
    """A small project with the doctor, and a Python with fake packages."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.site = folder / "site-packages"
        for name in ("core", "components", "agents", "training", "plugins", "recipes"):
            (self.home / name).mkdir(parents=True)
            (self.home / name / "__init__.py").touch()
        (self.home / "scripts").mkdir()
        for name in ("doctor.py", "doctor_probe.py", "setup.sh"):
            (self.home / "scripts" / name).write_bytes((ROOT / "scripts" / name).read_bytes())
        (self.home / "pyproject.toml").write_text('[project]\nname = "troupe"\n')
        (self.home / "constraints.txt").write_text("numpy==2.3.5\ntorch==2.13.0\n")
        self.site.mkdir()
        (self.site / "packaging").symlink_to(Path(packaging.__file__).parent)
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nPYTHONPATH="{self.site}" exec "{sys.executable}" -S "$@"\n')
        self.python.chmod(0o755)

    def package(self, name: str, version: str, *requires: str, module: str = "", text: str = "") -> None:
        info = self.site / f"{name}-{version}.dist-info"
        info.mkdir()
        lines = [f"Name: {name}", f"Version: {version}", *[f"Requires-Dist: {wish}" for wish in requires]]
        (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines]) + "\n")
        if module:
            (self.site / module).mkdir()
            (self.site / module / "__init__.py").write_text(text)
            (info / "top_level.txt").write_text(module + "\n")

    def venv(self, *state: str) -> None:
        (self.home / ".venv" / "bin").mkdir(parents=True)
        (self.home / ".venv" / "bin" / "python").symlink_to(self.python)
        if state:
            (self.home / ".venv" / ".setup").write_text("\n".join(state) + "\n")

    def doctor(self, **env: str) -> Lines:
        """Return the sections of the page. The exit code must agree with them."""
        variables = {"PATH": os.environ["PATH"], "HOME": str(self.home), "TROUPE_PYTHON": str(self.python)}
        done = run(self.home / "scripts" / "doctor.py", "--json", env=variables | env)
        page: dict[str, Any] = json.loads(done.stdout)
        assert (done.returncode == 0) == page["well"], done.stderr
        assert "Traceback" not in done.stderr
        return page["sections"]


def run(script: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)


def line(lines: list[dict[str, str]], name: str) -> dict[str, str]:
    """Return the only finding with a name."""
    (finding,) = [each for each in lines if each["name"] == name]
    return finding


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


@pytest.fixture(scope="module")
def module() -> ModuleType:
    """The doctor, imported as a module."""
    spec = importlib.util.spec_from_file_location("doctor", ROOT / "scripts" / "doctor.py")
    assert spec is not None
    assert spec.loader is not None
    doctor = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(doctor)
    return doctor


@pytest.mark.full
def test_the_page_of_this_machine_has_the_installed_versions_and_a_ray_that_runs_a_task() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_A")}
    done = run(ROOT / "scripts" / "doctor.py", "--json", "--ray", env=env | {"TROUPE_PYTHON": sys.executable})
    page = json.loads(done.stdout)
    assert (done.returncode == 0) == page["well"]
    assert not [each for lines in page["sections"].values() for each in lines if "Error" in each["text"]]
    assert line(page["sections"]["Ray"], "trial")["state"] == "ok"
    for name in ("torch", "ray", "numpy"):
        assert line(page["sections"]["Packages"], name)["text"].split()[0] == importlib.metadata.version(name)
    assert line(page["sections"]["Devices"], "torch")["state"] == "ok"
    assert line(page["sections"]["What will be used"], "generation")["text"].startswith(("hf, ", "vllm, "))


def test_the_page_ends_with_the_faults_and_their_fixes(house: House) -> None:
    done = run(house.home / "scripts" / "doctor.py", env={"PATH": os.environ["PATH"], "COLUMNS": "60"})
    assert done.returncode == 1
    page = done.stdout.splitlines()
    summary = done.stdout.rpartition("\n\n")[2].splitlines()
    assert [text.split()[:2] for text in page if "WRONG" in text].count(["WRONG", ".venv"]) == 1
    assert "  .venv: bash scripts/setup.sh" in summary


def venv_line(house: House, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the finding of a project's doctor on its .venv."""
    monkeypatch.setattr(module, "HOME", house.home)
    monkeypatch.setattr(module, "VENV", house.home / ".venv")
    monkeypatch.delenv("TROUPE_PYTHON", raising=False)
    return line(module.environment(None), ".venv")


@pytest.mark.parametrize(
    ("state", "fact", "verdict"),
    [
        (("unfinished",), "unfinished", "WRONG"),
        (("partial",), "partial", "WRONG"),
        (("abc -", "base", "cpu", "/elsewhere"), "/elsewhere", "WRONG"),
        (("abc -", "base", "cpu", "HOME"), "constraints.txt", "note"),
        ((), "by hand", "note"),
    ],
)
def test_an_incomplete_or_outdated_venv_is_reported(
    house: House,
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    state: tuple[str, ...],
    fact: str,
    verdict: str,
) -> None:
    house.venv(*[str(house.home) if part == "HOME" else part for part in state])
    finding = venv_line(house, module, monkeypatch)
    assert fact in finding["text"]
    assert (finding["state"], finding["mend"]) == (verdict, "bash scripts/setup.sh")


def test_a_venv_is_ready_when_its_stamp_is_the_one_that_setup_sh_computes(
    house: House, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = "sed -n '/^fingerprint()/,/^}/p; /^stamp()/p' scripts/setup.sh"
    command = f'home="$PWD"; venv_python="$1"; eval "$({functions})"; stamp'
    done = subprocess.run(["bash", "-c", command, "-", sys.executable], cwd=house.home, capture_output=True, text=True)
    house.venv(done.stdout.strip(), "base train", "cpu", str(house.home))
    finding = venv_line(house, module, monkeypatch)
    assert finding["state"] == "ok"
    assert re.search(says("torch for cpu", "base train"), finding["text"])


def test_an_unmet_requirement_names_its_package_and_the_pin_that_fixes_it(house: House) -> None:
    house.package("numpy", "2.5.0")
    house.package("numba", "0.65.0", "numpy<2.5,>=1.22", "llvmlite>=0.47", 'colorama; sys_platform == "win32"')
    lines = house.doctor()["Packages"]
    numpy, conflict = [each for each in lines if each["name"] == "numpy"]
    assert re.search(says("2.5.0", "constraints.txt", "2.3.5", "numba", "numpy<2.5,>=1.22"), numpy["text"])
    assert re.search(says("numba", "numpy<2.5,>=1.22", "2.5.0"), conflict["text"])
    assert (numpy["state"], conflict["state"]) == ("note", "WRONG")
    assert conflict["mend"] == f"{house.python} -m pip install -c constraints.txt 'numpy==2.3.5'"
    assert re.search(says("numba", "llvmlite>=0.47"), line(lines, "llvmlite")["text"])
    assert not [each for each in lines if each["name"] == "colorama"]


def test_a_package_with_a_name_of_the_project_is_reported_with_what_a_plain_python_imports(house: House) -> None:
    house.package("openai-agents", "1.0", module="agents")
    finding = line(house.doctor()["Packages"], "agents")
    # Once with its location, and once with what a plain Python imports.
    assert finding["text"].count(str(house.site / "agents")) == 2
    assert re.search(says("openai-agents"), finding["text"])
    assert (finding["state"], finding["mend"]) == ("WRONG", f"export PYTHONPATH={house.home}")


def test_each_broken_package_is_one_finding(house: House) -> None:
    (house.site / "half-1.0.dist-info").mkdir()
    (house.site / "odd-1.0.dist-info" / "METADATA").mkdir(parents=True)
    house.package("riddle", "1.0", "what is ~~ this")
    house.package("torch", "2.13.0+cpu", module="torch", text="raise ImportError('libtorch.so is truncated')")
    pages = house.doctor()
    broken = [each["text"] for each in pages["Packages"] if each["name"] == "broken"]
    assert [text for text in broken if "riddle" in text and "what is ~~ this" in text]
    assert line(pages["Packages"], "torch")["text"] == "2.13.0+cpu"
    assert re.search(says("ImportError", "libtorch.so is truncated"), line(pages["Devices"], "torch")["text"])


def test_a_torch_that_sees_no_gpu_of_the_machine_is_reported(house: House, tmp_path: Path) -> None:
    house.package("torch", "2.13.0+cpu", module="torch", text=WORKING_TORCH)
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 0 MiB, 580.65'\n")
    smi.chmod(0o755)
    lines = house.doctor(PATH=f"{smi.parent}:{os.environ['PATH']}")["Devices"]
    assert line(lines, "GPU 0")["text"].startswith("NVIDIA H200")
    torch = line(lines, "torch")
    assert re.search(says("2.13.0+cpu", "CPU", "1 GPU"), torch["text"])
    assert (torch["state"], torch["mend"]) == ("WRONG", "TROUPE_TORCH=cuda bash scripts/setup.sh")


def test_a_ray_address_is_wrong_only_if_nothing_listens_there(house: House) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # no other process can bind it meanwhile
        answering, silent = (f"127.0.0.1:{each.getsockname()[1]}" for each in (server, deaf))
        assert line(house.doctor(RAY_ADDRESS=answering)["Ray"], "a run")["state"] == "ok"
        finding = line(house.doctor(RAY_ADDRESS=silent)["Ray"], "a run")
    assert f"RAY_ADDRESS={silent}" in finding["text"]
    assert finding["state"] == "WRONG"


def test_keys_and_proxies_are_reported_without_their_values(house: House) -> None:
    pages = house.doctor(WANDB_API_KEY="geheim1234", https_proxy="http://me:geheim1234@proxy")
    without = house.doctor()
    assert line(pages["Beside"], "W&B") != line(without["Beside"], "W&B")
    assert line(pages["Beside"], "proxies")["text"] == "https_proxy"
    assert "geheim" not in json.dumps(pages)


def test_only_the_folder_of_a_dead_process_is_left_over(module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "owners").mkdir()
    for started, left in ((process_start(os.getpid()), False), ("1", True)):
        owner = {"machine": machine_id(), "pid": os.getpid(), "started": started}
        (tmp_path / "owners" / "1.json").write_text(json.dumps(owner))
        assert module.is_left_over(tmp_path) is left
    (tmp_path / "owners" / "1.json").write_text("{")
    assert module.is_left_over(tmp_path) is False


def test_small_shared_memory_is_wrong_with_the_command_that_enlarges_it(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "free", lambda _: (64e6, 60e6))
    finding = line(module.memory(None), "/dev/shm")
    assert finding["text"].count("0.1 GB") == 2
    assert (finding["state"], finding["mend"]) == (
        "WRONG",
        "mount -o remount,size=8G /dev/shm (docker run --shm-size=8g)",
    )


def test_a_section_that_raises_becomes_a_finding_with_its_error(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(module, "SECTIONS", {"Memory": breaks})
    monkeypatch.setattr(module, "probe", lambda _: {})
    pages = module.examined(with_ray=False)
    assert "PermissionError: no" in pages["Memory"][0]["text"]


def test_a_page_that_cannot_be_printed_is_one_line_on_stderr(house: House) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, str(house.home / "scripts" / "doctor.py")]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert re.search(says("doctor", "Errno 28"), done.stderr)
    assert done.stderr.count("\n") == 1


def test_the_doctor_is_valid_python_3_9() -> None:
    ast.parse((ROOT / "scripts" / "doctor.py").read_text(), feature_version=(3, 9))
