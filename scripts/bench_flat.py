"""Check that a run does not grow: memory, descriptors and threads of its processes, and its shared memory.

    python scripts/bench_flat.py        grpo on a tiny model: actor, rollout, reference, reward code, Ray's own
    python scripts/bench_flat.py --steps 40 --skip 10       a short trial of the script

Every few steps the script reads the resources of all descendants of the driver from /proc. It fits a line to the steps
after the first 300, in which Ray fills its history of 2,000 calls and its buffers. Exit code 1: a process, or the
shared memory of the run, grows by more than 1 MB, one descriptor or one thread per 100 steps.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from plugins.demo.warm_start import WarmStartSettings, make_warm_start  # noqa: E402 (may not be installed)

BAR = 1.0
"""Maximum growth in MB, descriptors or threads per 100 steps."""
EVERY = 3
"""Number of steps between two samples."""
OPTIONS = """prompts_per_step=2 samples_per_prompt=2 train.mini_batch_size=4 rollout.max_new_tokens=4
    algorithm.kl_coef=0.1 data.path=task:sort"""
REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    return {"rewards": [float(len(query) % 2) for query in queries]}
"""

Sample = tuple[int, float, float, float]
"""(finished steps, MB of resident memory, descriptors, threads)."""


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    processes: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, file.read_text().split()):
                processes += [child, *descendants(child)]
    return processes


def name_of(pid: int) -> str:
    """Return the title of a Ray process, or the module or program of another one."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    if words[0].startswith("ray::"):
        # The title of a worker ends with the method that it runs at the moment.
        return words[0].partition(".")[0]
    if "-m" in words:
        return words[words.index("-m") + 1]
    script = next((word for word in words[1:] if word.endswith(".py")), words[0])
    if script.endswith(".py"):
        return "/".join(Path(script).parts[-2:])
    return Path(script).name


def measure(pid: int, step: int) -> Sample:
    """Return the resources of a process after `step` steps."""
    status = Path(f"/proc/{pid}/status").read_text()
    kilobytes, threads = (
        int(re.search(rf"^{key}:\s+(\d+)", status, re.MULTILINE)[1])  # pyright: ignore[reportOptionalSubscript]
        for key in ("VmRSS", "Threads")
    )
    return step, kilobytes / 1024, float(len(list(Path(f"/proc/{pid}/fd").iterdir()))), float(threads)


def shared_megabytes(run_id: str) -> float:
    """Return the size of the run's folders in /dev/shm in MB."""
    total = 0
    for folder in Path("/dev/shm").glob(f"troupe-{run_id}*"):
        for inside, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError):
                    # Allocated blocks, because files in shared memory may be sparse.
                    total += (Path(inside) / name).stat().st_blocks * 512
    return total / 2**20


def watch(driver: subprocess.Popen[bytes], run_dir: Path) -> tuple[dict[tuple[str, int], list[Sample]], list[Sample]]:
    """Return (name, process id) -> samples of every process of a run, and the samples of its shared memory."""
    processes: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    names: dict[int, str] = {}
    shared: list[Sample] = []
    metrics = run_dir / "metrics.jsonl"
    log = run_dir / "logs" / "trainer-0.log"
    step = 0
    while driver.poll() is None:
        time.sleep(0.05)
        done = 0
        if metrics.exists():
            done = metrics.read_text().count("\n") - 1
        if done < step + EVERY:
            continue
        step = done
        for pid in [driver.pid, *descendants(driver.pid)]:
            with contextlib.suppress(OSError, TypeError):  # a process that has just ended has no such entries
                # The first name is kept: a worker of Ray has another title in each call.
                names[pid] = names.get(pid) or name_of(pid)
                processes[names[pid], pid].append(measure(pid, step))
        shared.append((step, shared_megabytes(log.read_text().split(" in run ")[-1].split()[0]), 0.0, 0.0))
    return processes, shared


def row(name: str, samples: list[Sample], skip: int) -> tuple[str, bool]:
    """Return a row of the table, and True if its slopes are below the bar."""
    steps, *columns = np.array([sample for sample in samples if sample[0] > skip]).T
    slopes = [100 * float(np.polyfit(steps, column, 1)[0]) for column in columns]
    megabytes = columns[0]
    values = [f"{megabytes[0]:.1f}", f"{megabytes[-1]:.1f}", *(f"{slope:+.2f}" for slope in slopes)]
    return f"| {name} | {' | '.join(values)} |", all(slope < BAR for slope in slopes)


def main() -> int:
    """Run the benchmark, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--skip", type=int, default=300, help="number of first steps that are not fitted")
    parser.add_argument("options", nargs="*", help="further options of grpo")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "reward.py").write_text(REWARD)
        os.environ |= {"OMP_NUM_THREADS": "1", "TROUPE_CACHE": scratch}
        model = make_warm_start(WarmStartSettings(task="sort", steps=1))
        run_dir = Path(scratch) / "run"
        command = [sys.executable, "-m", "recipes.grpo.main", f"run_dir={run_dir}", f"max_steps={arguments.steps}"]
        command += [
            *OPTIONS.split(),
            f"model.path={model}",
            f"reward.source={scratch}/reward.py",
            f"data.max_samples={2 * arguments.steps}",
        ]
        with subprocess.Popen([*command, *arguments.options], cwd=ROOT, stdout=subprocess.DEVNULL) as driver:
            processes, shared = watch(driver, run_dir)
    if driver.returncode:
        return driver.returncode
    # A slope over a few steps means nothing. Short-lived processes are only counted.
    lasting = {
        who: samples for who, samples in processes.items() if samples[-1][0] - samples[0][0] > arguments.steps / 2
    }
    rows = [row(name, samples, arguments.skip) for (name, _), samples in sorted(lasting.items())]
    rows.append(row("/dev/shm of the run", shared, arguments.skip))
    print("| process | MB then | MB at the end | MB per 100 steps | descriptors | threads |\n|---|---|---|---|---|---|")
    print("\n".join(text for text, _ in rows))
    print(f"{len(processes) - len(lasting)} further processes lived for less than half of the steps")
    return int(not all(is_flat for _, is_flat in rows))


if __name__ == "__main__":
    sys.exit(main())
