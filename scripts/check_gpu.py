"""Prove the CUDA side of the project on this machine's GPU, in four stages of at most ten minutes each.

    python scripts/check_gpu.py --stage a --out gpu.json     one stage; those that the file has already stay in it
    python scripts/check_gpu.py --out gpu.json               all of them
    python scripts/check_gpu.py --stage a --device cpu       the same code with tiny sizes, where there is no GPU
    python scripts/check_gpu.py --stage c --steps 5          runs of five steps instead of twenty
    python scripts/gpu_page.py gpu.json                      write the results into docs/gpu.md

Stages a and b need torch (2.11 or newer), transformers, safetensors and numpy, on Python 3.11 or 3.12; c and d all that
a run needs (`bash scripts/setup.sh vllm`). Nothing is downloaded: the models are random. Exit code 0: nothing failed;
1: something did; 2: nothing could be started.
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

HERE = Path(__file__).resolve().parent
STAGE_S = 600
FAILED, VERDICTS = "FAILED", ("ok", "FAILED", "measured", "not run")
RUNS = "check_gpu_runs.py"
STAGES = {
    "a": ("check_gpu_engines.py", "training, packing, generation, memory, by torch alone"),
    "b": ("check_gpu_weights.py", "weights from a trainer to an engine, by each way that they travel"),
    "c": (RUNS, "grpo with vLLM, its weights verified in each step, and with DeepSpeed's stages"),
    "d": (RUNS, "20 steps of grpo, openrlhf_ppo and verl_ppo, colocated and not, asynchronous and not"),
}
"""The program of each, and what it is about."""


@dataclass
class Stage:
    """What a stage has found."""

    what: str
    device: str
    day: str
    seconds: float = 0.0
    rows: list[dict[str, str]] = field(default_factory=list)


def run_stage(name: str, device: str, only: list[str], steps: int | None) -> Stage:
    """Run the program of a stage, as far as its time goes; each row is printed when it is there."""
    program, what = STAGES[name]
    if steps is not None and program == RUNS:
        only = [*only, f"--steps={steps}"]
    found = Stage(what, device, str(date.today()))
    command = [sys.executable, str(HERE / program), name, device, *only]
    print(f"\nStage {name}, {STAGE_S // 60} minutes at most: {what}\n    {' '.join(command)}\n", flush=True)
    print("| check | measured | asked | verdict |\n|---|---|---|---|", flush=True)
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert running.stdout is not None
        guard = threading.Timer(STAGE_S, os.killpg, (running.pid, signal.SIGTERM))
        guard.start()
        try:
            for printed in running.stdout:
                if printed.startswith("row "):
                    found.rows.append(json.loads(printed.removeprefix("row ")))
                    print(line(found.rows[-1]), flush=True)
            running.wait()
        finally:
            guard.cancel()
            if running.poll() is None:  # Ctrl-C comes to this process alone
                os.killpg(running.pid, signal.SIGTERM)
    found.seconds = round(time.monotonic() - began, 1)
    if running.returncode:
        late = found.seconds >= STAGE_S
        why = f"its {STAGE_S} s are over" if late else f"{program} ended with {running.returncode}"
        row = {"check": f"stage {name}", "measured": why, "asked": "", "verdict": "not run" if late else FAILED}
        found.rows.append(row)
        print(line(row), flush=True)
    return found


def line(row: dict[str, str]) -> str:
    return "| " + " | ".join(row[cell].replace("|", "/") for cell in ("check", "measured", "asked", "verdict")) + " |"


def device_name(device: str) -> str:
    """As torch calls it; empty where there is none."""
    if device == "cpu":
        return f"CPU, {os.cpu_count()} cores"
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="a JSON file; what it has of other stages stays")
    parser.add_argument("--stage", nargs="+", choices=list(STAGES), default=list(STAGES), help="these stages alone")
    parser.add_argument("--only", nargs="+", default=[], help="these checks of the stage alone, by their names")
    parser.add_argument("--steps", type=int, help="of each run of stages c and d")
    options = parser.parse_args()
    device = device_name(options.device)
    if not device:
        print("torch sees no GPU here; set --device cpu to try the code alone")
        return 2
    print(f"On {device}; {len(options.stage) * STAGE_S // 60} minutes at most.", flush=True)
    out: Path | None = options.out
    kept = json.loads(out.read_text(encoding="utf-8")) if out is not None and out.exists() else {}
    verdicts: list[str] = []
    for name in options.stage:
        stage = run_stage(name, options.device, options.only, options.steps)
        stage.device = device
        verdicts += [row["verdict"] for row in stage.rows]
        kept[name] = asdict(stage)
        if out is not None:
            out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print("\n" + ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS) + ".")
    return 1 if FAILED in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
