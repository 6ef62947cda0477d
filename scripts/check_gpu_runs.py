"""Stages c and d of check_gpu.py, and the end of stage f: complete runs of recipes with a model of random weights.

    python scripts/check_gpu_runs.py c cuda              all runs of a stage
    python scripts/check_gpu_runs.py d cpu grpo          those of one recipe; few steps of a tiny model
    python scripts/check_gpu_runs.py c cuda "grpo, vllm" this one alone
    python scripts/check_gpu_runs.py d cuda --steps 5    fewer steps, where there is little time

It needs the environment of a run (`bash scripts/setup.sh vllm`). Without vLLM the hf engine generates, unless a run
names vllm. It prints a JSON object per row. A run that needs more GPUs than the machine has is a row that says so.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from race_cases import SHARE_OF_A
from watch_process import gpu_memory

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from components.models.loading import without_progress_bars  # noqa: E402
from plugins.demo.tasks import get_task  # noqa: E402 (the project may not be installed)
from plugins.demo.tiny_model import task_tokenizer, tiny_model  # noqa: E402
from training.tracking.serialization import json_lines  # noqa: E402

EXACT = 0.05
"""Maximum mean difference between engine and trainer per token in bfloat16, in nats."""
APART = "placement.colocate=false"
TWO = "placement.devices_per_node=2"
TURNS = "placement.engines_sleep=true placement.learners_sleep=true"
ASYNC = f"{APART} asynchronous.enabled=true"
STAGES = {
    "c": {
        "grpo, vllm": "grpo rollout.engine=vllm",
        "grpo, vllm that sleeps": "grpo rollout.engine=vllm placement.engines_sleep=true placement.learners_sleep=true",
        "grpo, vllm, no CUDA graphs": "grpo rollout.engine=vllm rollout.enforce_eager=true",
        "grpo, vllm, engine core in its own process": "grpo rollout.engine=vllm rollout.own_process=true",
        "grpo, hf": "grpo rollout.engine=hf",
        **{f"grpo, DeepSpeed {n}": f"grpo train.engine=deepspeed train.zero_stage={n}" for n in (1, 2, 3)},
    },
    "d": {
        f"{recipe}, {how}": f"{recipe} {options}"
        for recipe in ("grpo", "openrlhf_ppo", "verl_ppo")
        for how, options in (("colocated", ""), ("apart", APART), ("asynchronous", ASYNC))
    },
    "f": {
        "grpo, 2 GPUs": f"grpo {TWO} rollout.engine=vllm",
        "grpo, 2 GPUs, roles that sleep": f"grpo {TWO} rollout.engine=vllm {TURNS}",
        "grpo, 2 GPUs, DeepSpeed 3": f"grpo {TWO} rollout.engine=vllm train.engine=deepspeed train.zero_stage=3",
        "grpo, an engine of 2 GPUs": f"grpo {TWO} rollout.engine=vllm rollout.tensor_parallel=2",
        "grpo, policy and engine apart": f"grpo {TWO} rollout.engine=vllm {APART} rollout.weight_sync=broadcast",
    },
}
"""Stage -> name of a run -> its recipe and options."""
WARNING = re.compile(r"\bWARN(ING)?\b|warning:|Warning:|\bERROR\b|Error\b|as they were published")
"""Pattern of lines of a log that are kept. The last one is logged if a direct transfer of weights failed and the engine
reads the folder."""
NUMBERS = re.compile(r"\d+")
MOST_WARNINGS = 12
"""Maximum number of different warnings of a run that are kept."""
MOST_CHARACTERS = 200
"""Maximum length of such a warning."""
MOST_LOG_BYTES = 2**20
"""Maximum number of bytes of each log that are kept, from its end."""
MEASURED = {
    "perf/tokens_per_second": "{:,.0f} tokens/s trained on",
    "perf/throughput": "{:,.0f} tokens/s and rank",
    "actor/mfu": "MFU {:.1%}",
    "actor/gpu_memory_gb": "{:.1f} GB of the policy's training",
    "rollout/gpu_memory_gb": "{:.1f} GB of the engine",
    "rollout/logprob_gap_mean": "{:.1e} nats between engine and trainer",
    "timing_s/generate": "{:.2f} s to generate",
    "timing_s/generate_prefill": "{:.2f} s of it until first tokens",
    "timing_s/generate_decode": "{:.2f} s for later tokens",
    "timing_s/generate_objects": "{:.2f} s for requests, outputs and batches",
    "timing_s/sync": "{:.2f} s for the weights",
    "timing_s/update_weights": "{:.2f} s for the weights",
}
"""Metric -> format of its median over the steps."""


@dataclass(frozen=True)
class Size:
    """Size of the model and of the run."""

    model: dict[str, int]
    steps: int
    options: list[str]


GPU = Size(
    {"hidden": 896, "layers": 24, "heads": 14, "intermediate": 4864},
    20,
    ["prompts_per_step=64", "samples_per_prompt=8", "rollout.max_new_tokens=64", "train.mini_batch_size=128"],
)
CPU = Size(
    {"hidden": 128, "layers": 2, "heads": 4, "intermediate": 256},
    2,
    ["prompts_per_step=4", "samples_per_prompt=4", "rollout.max_new_tokens=8", "train.mini_batch_size=16"],
)


def build(folder: Path, size: Size) -> None:
    """Write the model and the reward."""
    (folder.parent / "reward.py").write_text(SHARE_OF_A, encoding="utf-8")
    tokenizer = task_tokenizer(get_task("sort"))
    with without_progress_bars():
        tiny_model(tokenizer, 1, **size.model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run(
    name: str, command: str, size: Size, model: Path, folder: Path, logs: Path | None = None, limit_s: float = 1e6
) -> dict[str, Any]:
    """Run a recipe and return its row, with the warnings of all its processes.

    Args:
        name: name of the run.
        command: recipe and options.
        size: size of the run.
        model: folder of the model.
        folder: folder for the run.
        logs: folder for an archive of the logs. None: they are not kept.
        limit_s: time after which the run is interrupted. The steps up to then are measured.
    """
    recipe, *options = command.split()
    run_dir = run_folder(name, folder)
    prompts = int(size.options[0].partition("=")[2])
    settings = [f"model.path={model}", f"run_dir={run_dir}", "data.path=task:sort", "data.max_prompt_tokens=16"]
    settings += [f"reward.source={folder / 'reward.py'}", f"data.max_samples={prompts * size.steps}", "data.epochs=1"]
    # Evaluations are no part of the measurement. Verified syncs show an engine that has wrong weights.
    settings += ["evaluation.every=-1", "evaluation.max_samples=16", "rollout.verify_weight_sync=true"]
    program = [sys.executable, "-m", f"recipes.{recipe}.main", *settings, *size.options, *options]
    output = folder / "output.log"
    with gpu_memory(folder / "memory.txt") as used:
        exit_code, is_interrupted = execute(program, output, limit_s)
    row: dict[str, Any] = {"check": name, "required": "", "warnings": warnings_of([output, *log_files(run_dir)])}
    if logs is not None:
        keep_logs(logs / f"{run_dir.name}.tar.gz", [output, *log_files(run_dir)])
    steps = list(json_lines(run_dir / "metrics.jsonl")) if (run_dir / "metrics.jsonl").exists() else []
    if exit_code and not (is_interrupted and steps):
        text = output.read_text(encoding="utf-8", errors="replace")
        print(text, file=sys.stderr, flush=True)
        last = next((each for each in reversed(text.splitlines()) if each.strip()), "it printed nothing")
        # Exit code 2: the run was refused before its start, for example because of too few GPUs.
        verdict = "not run" if exit_code == 2 else "FAILED"
        return row | {"measured": f"exit code {exit_code}: {last}", "verdict": verdict}
    measured = [f"{len(steps)} steps", *medians(steps)]
    if is_interrupted:
        measured.append(f"interrupted after {limit_s:.0f} s")
    planned = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))["places"]
    of_gpu = [place["most"] for place in planned if place["place"].startswith("a GPU")]
    if used and of_gpu:
        measured.append(f"{max(used) / 1e9:.1f} GB of a GPU at most, planned {max(of_gpu) / 1e9:.1f} GB")
    if row["warnings"]:
        measured.append(f"{len(row['warnings'])} kinds of warnings")
    gaps = [step["rollout/logprob_gap_mean"] for step in steps if "rollout/logprob_gap_mean" in step]
    fits = bool(gaps) and statistics.median(gaps) < EXACT
    required = f"engine and trainer less than {EXACT} nats apart"
    return row | {"measured": "; ".join(measured), "required": required, "verdict": "ok" if fits else "FAILED"}


def run_folder(name: str, folder: Path) -> Path:
    """Return the run folder of a run."""
    return folder / name.replace(", ", "-").replace(" ", "_")


def execute(program: list[str], output: Path, limit_s: float) -> tuple[int, bool]:
    """Run a program with its output in a file. Return its exit code, and True if it was interrupted at the limit."""
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(program, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait(limit_s), False
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # the run closes its roles
        try:
            return process.wait(60), True
        except subprocess.TimeoutExpired:
            # A run that does not end by itself would hold the memory of the GPU that the next one needs.
            process.kill()
            return process.wait(), True


def log_files(run_dir: Path) -> list[Path]:
    """Return the logs of the roles of a run, and the files with its metrics, events, plan and options."""
    files = [path for path in sorted((run_dir / "logs").rglob("*")) if path.is_file()]
    names = ("metrics.jsonl", "events.jsonl", "plan.json", "config.yaml")
    return files + [run_dir / name for name in names if (run_dir / name).exists()]


def warnings_of(files: Sequence[Path]) -> dict[str, int]:
    """Return the most frequent warnings and errors in the logs with their counts: at most MOST_WARNINGS."""
    counts: Counter[str] = Counter()
    for path in files:
        if path.suffix in {"", ".log", ".txt", ".out", ".err"}:
            for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
                if WARNING.search(text):
                    # Without times and numbers of processes, so that repetitions count as one.
                    counts[NUMBERS.sub("N", text).strip()[:MOST_CHARACTERS]] += 1
    return dict(counts.most_common(MOST_WARNINGS))


def keep_logs(archive: Path, files: Sequence[Path]) -> None:
    """Write an archive with the ends of the files, at most MOST_LOG_BYTES of each."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
        for path in files:
            # The end of a log, which has the error.
            data = path.read_bytes()[-MOST_LOG_BYTES:]
            entry = tarfile.TarInfo(path.name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def medians(steps: list[dict[str, float]]) -> Iterator[str]:
    """Yield the medians of the metrics and the share of each phase, without the first step."""
    # The first step also allocates memory and selects kernels.
    later = steps[1:] or steps
    shares = sorted({metric for step in later for metric in step if metric.endswith("_share") and "perf/" in metric})
    for metric, shown in {**MEASURED, **{share: "{:.0%} " + share[5:-6] for share in shares}}.items():
        values = [step[metric] for step in later if metric in step]
        if values:
            yield shown.format(statistics.median(values))


def main() -> None:
    """Run the selected runs of a stage."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("only", nargs="*")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--logs", type=Path, help="folder for the logs of each run (default: they are not kept)")
    options = parser.parse_args()
    size = CPU if options.device == "cpu" else GPU
    if options.steps:
        size = replace(size, steps=options.steps)
    if options.device == "cpu":
        # A run would otherwise use the GPUs that it sees.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="check_gpu_") as folder:
        build(Path(folder) / "model", size)
        for name, command in STAGES[options.stage].items():
            if not options.only or name in options.only or name.partition(",")[0] in options.only:
                row = run(name, command, size, Path(folder) / "model", Path(folder), options.logs)
                print(f"row {json.dumps(row)}", flush=True)


if __name__ == "__main__":
    main()
