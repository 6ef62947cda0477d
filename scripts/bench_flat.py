"""Whether a run grows: memory, descriptors and threads of each of its processes, and its shared memory, step by step.

    python scripts/bench_flat.py        grpo on a tiny model: actor, rollout, reference, reward code, Ray's own
    python scripts/bench_flat.py --steps 40 --skip 10       to try the script

Every few steps /proc says what each process has that descends from the driver. A line is fitted to the steps behind
the first 300: in these Ray fills what it keeps of the last 2,000 calls, and its own buffers. Exits 1 where a
process, or the shared memory of the run, grows by more than 1 MB or one descriptor or thread per 100 steps.
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
"""MB, descriptors, threads per 100 steps."""
EVERY = 3
OPTIONS = """prompts_per_step=2 samples_per_prompt=2 train.mini_batch_size=4 rollout.max_new_tokens=4
    algorithm.kl_coef=0.1 data.path=task:sort"""
REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    return {"rewards": [float(len(query) % 2) for query in queries]}
"""

Sample = tuple[int, float, float, float]
"""Steps done, MB of resident memory, descriptors, threads."""


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, file.read_text().split()):
                found += [child, *descendants(child)]
    return found


def name_of(pid: int) -> str:
    """What a process is: its title, its module, or its program."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    if words[0].startswith("ray::"):
        return words[0].partition(".")[0]
    if "-m" in words:
        return words[words.index("-m") + 1]
    script = next((word for word in words[1:] if word.endswith(".py")), words[0])
    return "/".join(Path(script).parts[-2:]) if script.endswith(".py") else Path(script).name


def measure(pid: int, step: int) -> Sample:
    """What a process has now."""
    status = Path(f"/proc/{pid}/status").read_text()
    kilobytes, threads = (
        int(re.search(rf"^{key}:\s+(\d+)", status, re.MULTILINE)[1])  # pyright: ignore[reportOptionalSubscript]
        for key in ("VmRSS", "Threads")
    )
    return step, kilobytes / 1024, float(len(list(Path(f"/proc/{pid}/fd").iterdir()))), float(threads)


def shared_megabytes(run_id: str) -> float:
    """What lies in the run's folders in /dev/shm."""
    total = 0
    for folder in Path("/dev/shm").glob(f"troupe-{run_id}*"):
        for inside, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError):
                    total += (Path(inside) / name).stat().st_blocks * 512
    return total / 2**20


def watch(driver: subprocess.Popen[bytes], run_dir: Path) -> tuple[dict[tuple[str, int], list[Sample]], list[Sample]]:
    """Samples of every process of a run, by name and process id, and of its shared memory."""
    found: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    names: dict[int, str] = {}
    shared: list[Sample] = []
    metrics, log, step = run_dir / "metrics.jsonl", run_dir / "logs" / "trainer-0.log", 0
    while driver.poll() is None:
        time.sleep(0.05)
        done = metrics.read_text().count("\n") - 1 if metrics.exists() else 0
        if done < step + EVERY:
            continue
        step = done
        for pid in [driver.pid, *descendants(driver.pid)]:
            with contextlib.suppress(OSError, TypeError):  # a process that ends has no memory any more
                names[pid] = names.get(pid) or name_of(pid)
                found[names[pid], pid].append(measure(pid, step))
        shared.append((step, shared_megabytes(log.read_text().split(" in run ")[-1].split()[0]), 0.0, 0.0))
    return found, shared


def row(name: str, samples: list[Sample], skip: int) -> tuple[str, bool]:
    """A line of the table, and whether it is flat."""
    steps, *columns = np.array([sample for sample in samples if sample[0] > skip]).T
    slopes = [100 * float(np.polyfit(steps, column, 1)[0]) for column in columns]
    megabytes = columns[0]
    values = [f"{megabytes[0]:.1f}", f"{megabytes[-1]:.1f}", *(f"{slope:+.2f}" for slope in slopes)]
    return f"| {name} | {' | '.join(values)} |", all(slope < BAR for slope in slopes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--skip", type=int, default=300, help="steps before the first that counts")
    parser.add_argument("options", nargs="*", help="further options of grpo")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "reward.py").write_text(REWARD)
        os.environ |= {"OMP_NUM_THREADS": "1", "TROUPE_CACHE": scratch}
        model, run_dir = make_warm_start(WarmStartSettings(task="sort", steps=1)), Path(scratch) / "run"
        command = [sys.executable, "-m", "recipes.grpo.main", f"run_dir={run_dir}", f"max_steps={asked.steps}"]
        command += [
            *OPTIONS.split(),
            f"model.path={model}",
            f"reward.source={scratch}/reward.py",
            f"data.max_samples={2 * asked.steps}",
        ]
        with subprocess.Popen([*command, *asked.options], cwd=ROOT, stdout=subprocess.DEVNULL) as driver:
            found, shared = watch(driver, run_dir)
    if driver.returncode:
        return driver.returncode
    # What lived for a few steps only, as a program that runs at the end, shows no slope.
    lasting = {who: samples for who, samples in found.items() if samples[-1][0] - samples[0][0] > asked.steps / 2}
    rows = [row(name, samples, asked.skip) for (name, _), samples in sorted(lasting.items())]
    rows.append(row("/dev/shm of the run", shared, asked.skip))
    print("| process | MB then | MB at the end | MB per 100 steps | descriptors | threads |\n|---|---|---|---|---|---|")
    print("\n".join(line for line, _ in rows))
    print(f"{len(found) - len(lasting)} further processes lived for less than half of the steps")
    return 0 if all(flat for _, flat in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
