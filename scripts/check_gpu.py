"""Check the CUDA side of the project on the GPUs of this machine, in seven stages of at most ten minutes each.

    python scripts/check_gpu.py --stage a --out gpu.json     one stage; results of other stages in the file stay
    python scripts/check_gpu.py --out gpu.json               all stages
    python scripts/check_gpu.py --stage a --device cpu       the same code with tiny sizes, without a GPU
    python scripts/check_gpu.py --stage c --steps 5          runs of five steps instead of twenty
    python scripts/gpu_page.py gpu.json                      write the results into docs/gpu.md

Stages a and b need torch (2.11 or newer), transformers, safetensors and numpy, on Python 3.11 or 3.12. The others
need the environment of a run (`bash scripts/setup.sh vllm`). Stages f and g need two GPUs, of one machine and of two
(check_gpu_group.py says how to start g); elsewhere their checks are not run. Nothing is downloaded: the models have
random weights. Exit code: 0 no check failed; 1 a check failed; 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STAGE_S = 600
"""Timeout of a stage in seconds."""
FAILED = "FAILED"
VERDICTS = ("ok", "FAILED", "measured", "not run")
RUNS, SYNC, GROUP = "check_gpu_runs.py", "check_gpu_sync.py", "check_gpu_group.py"
STAGES = {
    "a": ("check_gpu_engines.py", "training, packing, generation, memory, by torch alone"),
    "b": ("check_gpu_weights.py", "weights from a trainer to an engine, by each way that they travel"),
    "c": (RUNS, "grpo with vLLM, its weights verified in each step, and with DeepSpeed's stages"),
    "d": (RUNS, "20 steps of grpo, openrlhf_ppo and verl_ppo, colocated and not, asynchronous and not"),
    "e": (SYNC, "30 steps with vLLM, weights verified and not, each timer; the causes of a slow weight sync"),
    "f": (GROUP, "two GPUs: collectives, FSDP and tensor parallelism, weights to two engines, runs"),
    "g": (GROUP, "two machines: collectives, FSDP, weights; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set"),
}
"""Stage -> (program, subject)."""


@dataclass
class Stage:
    """Results of a stage."""

    what: str
    device: str
    day: str
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the table. That of a run also has its `warnings` with their counts."""


def run_stage(name: str, device: str, only: list[str], steps: int | None, logs: Path | None) -> Stage:
    """Run the program of a stage within its timeout. Print each row as soon as it is available.

    Args:
        name: key of STAGES.
        device: `cuda` or `cpu`.
        only: names of the checks to run. Empty: all.
        steps: number of steps of each run. None: the default of the stage.
        logs: folder for the logs of the runs. None: they are not kept.
    """
    program, what = STAGES[name]
    if program in (RUNS, SYNC):
        only = [*only, *([f"--steps={steps}"] if steps is not None else []), *([f"--logs={logs}"] if logs else [])]
    stage = Stage(what, device, str(date.today()))
    command = [sys.executable, str(HERE / program), name, device, *only]
    print(f"\nStage {name}, {STAGE_S // 60} minutes at most: {what}\n    {' '.join(command)}\n", flush=True)
    print("| check | measured | required | verdict |\n|---|---|---|---|", flush=True)
    began = time.monotonic()
    # A session of its own, so that all processes of the stage can be ended together.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert running.stdout is not None
        guard = threading.Timer(STAGE_S, os.killpg, (running.pid, signal.SIGTERM))
        guard.start()
        try:
            for printed in running.stdout:
                if printed.startswith("row "):
                    stage.rows.append(json.loads(printed.removeprefix("row ")))
                    print(table_row(stage.rows[-1]), flush=True)
            running.wait()
        finally:
            guard.cancel()
            if running.poll() is None:  # Ctrl-C reaches only this process
                os.killpg(running.pid, signal.SIGTERM)
    stage.seconds = round(time.monotonic() - began, 1)
    if running.returncode:
        why = f"{program} ended with {running.returncode}"
        verdict = FAILED
        if stage.seconds >= STAGE_S:
            why = f"stopped after {STAGE_S} s"
            verdict = "not run"
        row = {"check": f"stage {name}", "measured": why, "required": "", "verdict": verdict}
        stage.rows.append(row)
        print(table_row(row), flush=True)
    return stage


def table_row(row: dict[str, Any]) -> str:
    """Return a row as Markdown."""
    return (
        "| " + " | ".join(row[cell].replace("|", "/") for cell in ("check", "measured", "required", "verdict")) + " |"
    )


def device_name(device: str) -> str:
    """Return the name of the device as torch reports it, or "" if there is no GPU."""
    if device == "cpu":
        return f"CPU, {os.cpu_count()} cores"
    import torch

    if not torch.cuda.is_available():
        return ""
    return torch.cuda.get_device_name()


def main() -> int:
    """Run the stages and write their results. Return the exit code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--out", type=Path, help="JSON file for the results, beside which a folder gets the logs of runs"
    )
    parser.add_argument(
        "--stage", nargs="+", choices=list(STAGES), default=list(STAGES), help="stages to run (default: all)"
    )
    parser.add_argument("--only", nargs="+", default=[], help="names of the checks to run (default: all of the stage)")
    parser.add_argument("--steps", type=int, help="number of steps of each run of stages c to e")
    options = parser.parse_args()
    device = device_name(options.device)
    if not device:
        print("torch sees no GPU here; set --device cpu to run the code with tiny sizes")
        return 2
    print(f"On {device}; {len(options.stage) * STAGE_S // 60} minutes at most.", flush=True)
    out: Path | None = options.out
    kept = {}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    if out is not None and out.exists():
        kept = json.loads(out.read_text(encoding="utf-8"))
    verdicts: list[str] = []
    for name in options.stage:
        logs = None if out is None else out.absolute().with_suffix(".logs") / name
        stage = run_stage(name, options.device, options.only, options.steps, logs)
        stage.device = device
        verdicts += [row["verdict"] for row in stage.rows]
        # Written after each stage, so that an interrupted check keeps the results so far.
        kept[name] = asdict(stage)
        if out is not None:
            out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print("\n" + ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS) + ".")
    return int(FAILED in verdicts)


if __name__ == "__main__":
    sys.exit(main())
