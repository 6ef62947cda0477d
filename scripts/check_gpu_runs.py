"""Stages c and d of check_gpu.py: complete runs of recipes with a model of random weights.

    python scripts/check_gpu_runs.py c cuda              all runs of a stage
    python scripts/check_gpu_runs.py d cpu grpo          those of one recipe; few steps of a tiny model
    python scripts/check_gpu_runs.py c cuda "grpo, vllm" this one alone
    python scripts/check_gpu_runs.py d cuda --steps 5    fewer steps, where there is little time

It needs the environment of a run (`bash scripts/setup.sh vllm`). Without vLLM the hf engine generates, unless a run
names vllm. It prints a JSON object per row. A run that needs more GPUs than the machine has is a row that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from components.models.loading import without_progress_bars  # noqa: E402
from plugins.demo.tasks import get_task  # noqa: E402 (the project may not be installed)
from plugins.demo.tiny_model import task_tokenizer, tiny_model  # noqa: E402
from training.tracking.serialization import json_lines  # noqa: E402

EXACT = 0.05
"""Maximum mean difference between engine and trainer per token in bfloat16, in nats."""
APART = "placement.colocate=false"
ASYNC = f"{APART} asynchronous.enabled=true"
STAGES = {
    "c": {
        "grpo, vllm": "grpo rollout.engine=vllm",
        "grpo, vllm that sleeps": "grpo rollout.engine=vllm placement.engines_sleep=true placement.learners_sleep=true",
        "grpo, vllm, no CUDA graphs": "grpo rollout.engine=vllm rollout.enforce_eager=true",
        "grpo, hf": "grpo rollout.engine=hf",
        **{f"grpo, DeepSpeed {n}": f"grpo train.engine=deepspeed train.zero_stage={n}" for n in (1, 2, 3)},
    },
    "d": {
        f"{recipe}, {how}": f"{recipe} {options}"
        for recipe in ("grpo", "openrlhf_ppo", "verl_ppo")
        for how, options in (("colocated", ""), ("apart", APART), ("asynchronous", ASYNC))
    },
}
"""Stage -> name of a run -> its recipe and options."""
MEASURED = {
    "perf/tokens_per_second": "{:,.0f} tokens/s trained on",
    "perf/throughput": "{:,.0f} tokens/s and rank",
    "actor/mfu": "MFU {:.1%}",
    "actor/gpu_memory_gb": "{:.1f} GB of the policy's training",
    "rollout/gpu_memory_gb": "{:.1f} GB of the engine",
    "rollout/logprob_gap_mean": "{:.1e} nats between engine and trainer",
    "timing_s/sync": "{:.2f} s for the weights",
    "timing_s/update_weights": "{:.2f} s for the weights",
}
"""Metric -> format of its median over the steps."""
REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    texts = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    return {"rewards": [text.count("a") / max(1, len(text)) for text in texts]}
"""
"""A reward that differs within a group from the first step on, so that every step changes the weights."""


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
    (folder.parent / "reward.py").write_text(REWARD, encoding="utf-8")
    tokenizer = task_tokenizer(get_task("sort"))
    with without_progress_bars():
        tiny_model(tokenizer, 1, **size.model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run(name: str, command: str, size: Size, model: Path, folder: Path) -> dict[str, str]:
    """Run a recipe and return its row."""
    recipe, *options = command.split()
    run_dir = folder / name.replace(", ", "-").replace(" ", "_")
    prompts = int(size.options[0].partition("=")[2])
    settings = [f"model.path={model}", f"run_dir={run_dir}", "data.path=task:sort", "data.max_prompt_tokens=16"]
    settings += [f"reward.source={folder / 'reward.py'}", f"data.max_samples={prompts * size.steps}", "data.epochs=1"]
    settings += ["evaluation.every=-1", "evaluation.max_samples=16", "rollout.verify_weight_sync=true"]
    program = [sys.executable, "-m", f"recipes.{recipe}.main", *settings, *size.options, *options]
    with gpu_memory(folder / "memory.txt") as used:
        ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(ended.stdout, ended.stderr, sep="\n", file=sys.stderr, flush=True)
        output = (ended.stderr.strip() or ended.stdout.strip()).splitlines()
        # Exit code 2: the run was refused before its start, for example because of too few GPUs.
        verdict = "not run" if ended.returncode == 2 else "FAILED"
        why = f"exit code {ended.returncode}: {output[-1] if output else 'it printed nothing'}"
        return {"check": name, "measured": why, "required": "", "verdict": verdict}
    steps = list(json_lines(run_dir / "metrics.jsonl"))
    measured = [f"{json.loads((run_dir / 'summary.json').read_text())['steps']} steps", *medians(steps)]
    planned = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))["places"]
    of_gpu = [place["most"] for place in planned if place["place"].startswith("a GPU")]
    if used and of_gpu:
        measured.append(f"{max(used) / 1e9:.1f} GB of a GPU at most, planned {max(of_gpu) / 1e9:.1f} GB")
    gaps = [step["rollout/logprob_gap_mean"] for step in steps if "rollout/logprob_gap_mean" in step]
    fits = bool(gaps) and statistics.median(gaps) < EXACT
    required = f"engine and trainer less than {EXACT} nats apart"
    return {"check": name, "measured": "; ".join(measured), "required": required, "verdict": "ok" if fits else "FAILED"}


@contextlib.contextmanager
def gpu_memory(noted: Path) -> Iterator[list[int]]:
    """Yield a list that afterwards has the used bytes of each GPU, twice per second. Empty without nvidia-smi."""
    samples: list[int] = []
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield samples
        return
    command = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop-ms=500"]
    with noted.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL) as asking:
        try:
            yield samples
        finally:
            asking.terminate()
    samples += [int(text) * 2**20 for text in noted.read_text().split() if text.isdigit()]


def medians(steps: list[dict[str, float]]) -> Iterator[str]:
    """Yield the medians of the metrics and the share of each phase, without the first step."""
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
    options = parser.parse_args()
    size = CPU if options.device == "cpu" else GPU
    if options.steps:
        size = replace(size, steps=options.steps)
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="check_gpu_") as folder:
        build(Path(folder) / "model", size)
        for name, command in STAGES[options.stage].items():
            if not options.only or name in options.only or name.partition(",")[0] in options.only:
                row = run(name, command, size, Path(folder) / "model", Path(folder))
                print(f"row {json.dumps(row)}", flush=True)


if __name__ == "__main__":
    main()
