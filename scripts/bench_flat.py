"""Whether a long run keeps to what it has: memory, descriptors, shared memory of each of its processes per 100 steps.

    python scripts/bench_flat.py [STEPS]

Runs grpo with a model of a few thousand parameters and a Ray of its own, and looks at the run, all its descendants (the
GCS, the raylet, the report's process) and /dev/shm once a second. The first third of the steps is warming up. Exit code
1 where the slope of anything is above its limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
MOST_MB, MOST_DESCRIPTORS = 1.0, 1.0
"""Per 100 steps."""
SMALL = (
    "data.path=task:sort prompts_per_step=2 samples_per_prompt=2 train.mini_batch_size=4 rollout.max_new_tokens=4 "
    "algorithm.kl_coef=0.1 evaluation.every=-1 checkpoint.every=50"
)
Measured = dict[str, list[tuple[float, float, float]]]
"""Name of a process -> (step, resident MB that no file backs, descriptors)."""


def descendants(pid: int) -> dict[int, str]:
    """Living processes that a process has started, and these, with the last words of their commands."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            children[int(stat.read_text().rpartition(")")[2].split()[1])].append(int(stat.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    found = [pid]
    for one in found:
        found += children[one]
    return {one: name_of(one) for one in found}


def name_of(pid: int) -> str:
    """What tells a process from the others, for a table."""
    try:
        words = (Path(f"/proc/{pid}/cmdline").read_bytes()).replace(b"\0", b" ").decode(errors="replace").split()
    except OSError:
        return ""
    place = next((word for word in words if word.endswith((".py", "gcs_server", "raylet")) or "." in word[:-3]), "")
    return f"{pid} {(words or [''])[0].rpartition('/')[2]} {place.rpartition('/')[2]}"


def look(pid: int, step: int, found: Measured) -> None:
    """Note what each process has now."""
    for one, name in descendants(pid).items():
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{one}/status").read_text().splitlines())
            count = len(list(Path(f"/proc/{one}/fd").iterdir()))
        except OSError:
            continue
        if "RssAnon" in status:
            found[name].append((step, int(status["RssAnon"].split()[0]) / 1024, count))


def slopes(found: Measured, steps: int) -> list[tuple[str, float, float]]:
    """Of each process that was there for most of the run: its name, MB and descriptors per 100 steps."""
    result = []
    for name, rows in found.items():
        late = np.array([row for row in rows if row[0] > steps / 3])
        if len(late) > 5 and late[-1, 0] - late[0, 0] > steps / 3:
            (memory, count), _ = np.polyfit(late[:, 0], late[:, 1:], 1)
            result.append((name, memory * 100, count * 100))
    return result


def main(steps: int) -> int:
    """Run, measure, print a table."""
    found: Measured = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "run", "metrics.jsonl")
        command = [sys.executable, "-m", "recipes.grpo.main", f"run_dir={folder}/run", f"max_steps={steps}"]
        run = subprocess.Popen([*command, *SMALL.split()], cwd=ROOT, stdout=subprocess.DEVNULL)
        while run.poll() is None:
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            step = json.loads(lines[-1])["step"] if lines else 0
            look(run.pid, step, found)
            shared = sum(file.stat().st_blocks * 512 for file in Path("/dev/shm").rglob("*") if file.is_file())
            found["/dev/shm"].append((step, shared / 2**20, 0.0))
            time.sleep(1.0)
    is_flat = run.returncode == 0
    print(f"{'process':60} MB/100 steps  descriptors/100 steps")
    for name, memory, count in slopes(found, steps):
        fits = memory < MOST_MB and count < MOST_DESCRIPTORS
        is_flat &= fits
        print(f"{name:60} {memory:12.2f} {count:22.2f}{'' if fits else '  <- not flat'}")
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main(int((sys.argv[1:] or ["300"])[0])))
