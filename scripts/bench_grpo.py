"""Compare a step of recipes/grpo with one of TRL's GRPOTrainer: the same model, prompts, sizes and optimizer.

    python scripts/bench_grpo.py                       all cases, an hour on two cores
    python scripts/bench_grpo.py fixed16 sort          some of them: fixed16, fixed64, natural, sort, long_prompts
    python scripts/bench_grpo.py --threads 1 --pairs 3

A step has 64 prompts x 8 responses and one optimizer step over all of them, without KL, in float32, with a model of 0.4
million parameters. Cases: with fixed lengths there is no end token; `natural` has the lengths of an untrained model;
`sort` is the demonstration task from its warm start; `long_prompts` has 128 tokens before 64 of the response. A pair is
one process of each side, one after the other, in an order that changes from pair to pair. Each trains for a few steps;
the first two are not measured. TRL gets a separate environment in the cache folder, which uses our torch and
transformers, and the micro-batch size (of two) with the lower CPU time. Our side has the defaults of the recipe.

It prints medians: wall seconds from step to step (so nothing is left out), those of generation, the CPU seconds of all
processes of the run, and the ratio within pairs, TRL's wall seconds divided by ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from components.models.sources import resolve_model  # noqa: E402
from components.net.hub import cache_root  # noqa: E402
from plugins.demo.tasks import get_task  # noqa: E402 (may not be installed)

TRL = "1.16.0"
PROMPTS = 64
ANSWERS = 8
WARM_UP = 2
DEVICE_BATCHES = (128, 512)
SHARE_OF_A = """
def reward_func(queries, prompts, labels, **kwargs):
    texts = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    return {"rewards": [text.count("a") / max(1, len(text)) for text in texts]}
"""


@dataclass(frozen=True)
class Case:
    """Lengths, number of steps and model of a comparison."""

    title: str
    max_new_tokens: int
    steps: int
    fixed_length: bool = False
    warm_start: bool = False
    prompt_tokens: int = 0
    """Length of random prompts. 0: the prompts of the task sort."""


CASES = {
    "fixed16": Case("fixed length 16", 16, 8, fixed_length=True),
    "fixed64": Case("fixed length 64", 64, 7, fixed_length=True),
    "natural": Case("natural lengths, at most 128", 128, 7),
    "sort": Case("sort, at most 8", 8, 10, warm_start=True),
    "long_prompts": Case("prompts of 128, length 64", 64, 6, fixed_length=True, prompt_tokens=128),
}


@dataclass(frozen=True)
class Side:
    """Medians of one process: seconds per step, and mean response length."""

    step_s: float
    generate_s: float
    cpu_s: float
    length: float


def prompts_of(case: Case, folder: Path) -> Path:
    """Return the file with the prompts of a case."""
    return folder / f"prompts{case.prompt_tokens}.jsonl"


def prepare(folder: Path) -> None:
    """Write the prompts, our reward, and the untrained model twice: with and without an end token."""
    import random
    import string

    from plugins.demo.tiny_model import character_tokenizer, tiny_model

    rows = get_task("sort").rows("train", PROMPTS * max(case.steps for case in CASES.values()), seed=0)
    letters = random.Random(0)
    for case in CASES.values():
        length = case.prompt_tokens
        inputs = ["".join(letters.choices(string.ascii_lowercase, k=length)) or row["input"] for row in rows]
        records = [json.dumps({**row, "input": text}) + "\n" for row, text in zip(rows, inputs, strict=True)]
        prompts_of(case, folder).write_text("".join(records), encoding="utf-8")
    (folder / "reward.py").write_text(SHARE_OF_A, encoding="utf-8")
    tokenizer = character_tokenizer(string.ascii_lowercase + string.digits + ">+")
    model = tiny_model(tokenizer, 0)
    for name in ("natural", "fixed"):
        if name == "fixed":
            model.generation_config.eos_token_id = None
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def trl_python() -> Path:
    """Return the Python of TRL's environment, created if missing. It imports shared packages from ours."""
    import sysconfig

    folder = cache_root() / f"bench_trl-{TRL}"
    python = folder / "bin" / "python"
    done = folder / "ready"
    ours = sysconfig.get_paths()["purelib"]
    if done.is_file() and done.read_text(encoding="utf-8") == ours:
        return python
    print(f"TRL {TRL} goes to {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    query = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    packages = Path(subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip())
    (packages / "shared.pth").write_text(ours + "\n", encoding="utf-8")
    install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), f"trl=={TRL}"]
    subprocess.run(install, check=True)
    done.write_text(ours, encoding="utf-8")
    return python


def watched(
    command: list[str], threads: int, rows_path: Path, log: Path, measure: Callable[[], dict[str, float]] = dict
) -> list[dict[str, float]]:
    """Run a process. Return the JSON rows that it wrote, each with the CPU seconds used so far.

    Args:
        command: the command.
        threads: value of OMP_NUM_THREADS.
        rows_path: file to which it appends one JSON object per step.
        log: file for its output.
        measure: returns further values of a row.
    """
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    rows: list[dict[str, float]] = []
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
        ended = False
        try:
            while not ended:
                ended = process.poll() is not None  # before the file is read, so that the last rows are not missed
                texts: list[str] = []
                if rows_path.is_file():
                    texts = rows_path.read_text(encoding="utf-8").splitlines(keepends=True)
                new = [json.loads(text) for text in texts[len(rows) :] if text.endswith("\n")]
                if new:  # only then, because reading /proc takes milliseconds from the measured processes
                    # At the end /proc no longer has the process; the last value is then the best one.
                    used = max([cpu_seconds(process.pid), *(row["cpu"] for row in rows[-1:])])
                    rows += [{**row, "cpu": used, **measure()} for row in new]
                time.sleep(0.02)
        finally:
            process.kill()
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text(encoding='utf-8')[-3000:]}")
    return rows


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants, including those that have ended."""
    parents: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has just ended
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        ticks[int(stat.parent.name)] = sum(map(int, fields[11:15]))
    total = 0
    processes = [pid]
    while processes:
        process = processes.pop()
        total += ticks.get(process, 0)
        processes += parents.get(process, [])
    return total / os.sysconf("SC_CLK_TCK")


def medians(rows: list[dict[str, float]], time_key: str, generate_key: str, length_key: str) -> Side:
    """Return the medians of the steps after the warm-up, from the end of one step to the end of the next."""
    pairs = list(zip(rows[WARM_UP - 1 :], rows[WARM_UP:], strict=False))
    return Side(
        step_s=statistics.median(after[time_key] - before[time_key] for before, after in pairs),
        generate_s=statistics.median(after[generate_key] for _, after in pairs),
        cpu_s=statistics.median(after["cpu"] - before["cpu"] for before, after in pairs),
        length=statistics.mean(after[length_key] for _, after in pairs),
    )


def model_of(case: Case, folder: Path) -> str:
    """Return the folder of the model of our side."""
    if case.warm_start:
        return resolve_model("warm_start:sort")
    return str(folder / {True: "fixed", False: "natural"}[case.fixed_length])


def ours(case: Case, threads: int, folder: Path, backend: str) -> Side:
    """Run recipes/grpo once."""
    reward = str(folder / "reward.py")
    if case.warm_start:
        reward = "sort"
    with tempfile.TemporaryDirectory(dir=folder) as run_dir:
        options = {
            "run_dir": run_dir,
            "backend": backend,
            "resume": "none",
            "model.path": model_of(case, folder),
            "data.path": prompts_of(case, folder),
            "data.label_key": "label",
            "data.max_samples": PROMPTS * case.steps,
            "reward.source": reward,
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": ANSWERS,
            "rollout.max_new_tokens": case.max_new_tokens,
            "train.learning_rate": 1e-6,
        }
        command = [sys.executable, "-m", "recipes.grpo.main", *(f"{name}={value}" for name, value in options.items())]
        rows = watched(command, threads, Path(run_dir) / "metrics.jsonl", folder / "ours.log")
    return medians(rows, "time", "timing_s/generate", "rollout/response_length")


def theirs(case: Case, threads: int, folder: Path, device_batch: int, steps: int = 0) -> Side:
    """Run TRL once."""
    # Both models have an end token: TRL does not start without one. The setting `fixed_length` suppresses it.
    model = str(folder / "natural")
    reward = "share"
    if case.warm_start:
        model = model_of(case, folder)
        reward = "match"
    with tempfile.TemporaryDirectory(dir=folder) as run_dir:
        settings: dict[str, Any] = {
            "folder": run_dir,
            "model": model,
            "prompts": str(prompts_of(case, folder)),
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": ANSWERS,
            "max_new_tokens": case.max_new_tokens,
            "fixed_length": case.fixed_length,
            "reward": reward,
            "learning_rate": 1e-6,
            "steps": steps or case.steps,
            "device_batch": device_batch,
            "threads": threads,
        }
        path = Path(run_dir) / "settings.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        command = [str(trl_python()), str(ROOT / "scripts" / "bench_grpo_trl.py"), str(path)]
        rows = watched(command, threads, Path(run_dir) / "steps.jsonl", folder / "trl.log")
    return medians(rows, "time", "generate_s", "length")


def compare(name: str, threads: int, pairs: int, folder: Path, device_batch: int, backend: str) -> None:
    """Print one row of the table."""
    case = CASES[name]
    grpo: list[Side] = []
    trl: list[Side] = []
    for index in range(pairs):
        for side in (("trl", "ours"), ("ours", "trl"))[index % 2]:
            if side == "ours":
                grpo.append(ours(case, threads, folder, backend))
            else:
                trl.append(theirs(case, threads, folder, device_batch))

    def middle(sides: list[Side], field: str) -> float:
        return statistics.median(getattr(side, field) for side in sides)

    cells = [
        f"{middle(sides, 'step_s'):.2f} ({middle(sides, 'generate_s'):.2f}) | {middle(sides, 'cpu_s'):.2f}"
        for sides in (trl, grpo)
    ]
    ratios = [
        [getattr(a, field) / getattr(b, field) for a, b in zip(trl, grpo, strict=True)] for field in ("step_s", "cpu_s")
    ]
    wall, cpu = (f"{statistics.median(each):.2f} ({min(each):.2f} .. {max(each):.2f})" for each in ratios)
    lengths = f"{middle(trl, 'length'):.1f}, {middle(grpo, 'length'):.1f}"
    samples = PROMPTS * ANSWERS / middle(grpo, "step_s")
    print(
        f"| {case.title} | {threads} | {' | '.join(cells)} | {wall} | {cpu} | {samples:.0f} | {lengths} |", flush=True
    )


def fastest_batch(name: str, folder: Path) -> int:
    """Return the micro-batch size with which TRL needs less CPU time on one thread."""
    taken = {size: theirs(CASES[name], 1, folder, size, steps=WARM_UP + 2).cpu_s for size in DEVICE_BATCHES}
    return min(taken, key=lambda size: taken[size])


def main() -> None:
    """Run the selected cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="cases to run (default: all)")
    parser.add_argument(
        "--threads", type=int, nargs="*", default=[1, os.cpu_count() or 1], help="threads of both sides"
    )
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side per row")
    parser.add_argument(
        "--device_batch", type=int, help="micro-batch size of TRL (default: the better one of 128 and 512)"
    )
    parser.add_argument(
        "--backend", choices=["ray", "local"], default="ray", help="backend of our side; local: one process"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        print(
            f"TRL {TRL}, {os.cpu_count()} cores, {options.pairs} pairs\n\n| | threads | TRL step, s (generation) | ",
            end="",
        )
        print("CPU s | ours, s (generation) | CPU s | ratio (range) | of CPU s | our samples/s | mean lengths |")
        print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
        for case in options.cases or CASES:
            device_batch = options.device_batch or fastest_batch(case, folder)
            for threads in options.threads:
                compare(case, threads, options.pairs, folder, device_batch, options.backend)


if __name__ == "__main__":
    main()
