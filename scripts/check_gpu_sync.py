"""Stage e of check_gpu.py: the parts of a weight sync, and experiments on one that becomes slower during a run.

    python scripts/check_gpu_sync.py e cuda             all checks
    python scripts/check_gpu_sync.py e cpu digests      some of them, with tiny sizes
    python scripts/check_gpu_sync.py e cuda runs --steps 10

On an H200 a sync took 0.9 to 1.8 s in steps 1 to 10 of a run and 5.7 to 6.7 s in steps 11 to 20 (docs/gpu.md, section
"Not understood"). `runs` records every timer of 30 steps with and without verification. The other checks isolate one
possible cause each, and take a minute at most:

    digests    the host computes digests slowly: digests by number of threads and OpenMP wait policy, alone and beside
               other work
    engine     vLLM becomes slower: 30 times sleep, wake, receive, wake, without a trainer
    fallback   a direct transfer breaks off, and the engine reads the folder: the warnings of `runs`
    versions   the memory of a version is not reused: page faults and seconds of 20 versions

`runs`, `engine` and `fallback` need the environment of a run. Prints a line of JSON for each row.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import check_gpu_runs
import torch
from check_gpu_engines import machine
from check_gpu_memory import save_random
from check_gpu_parts import (
    FAILED,
    NOT_RUN,
    ROOT,
    Check,
    Row,
    Setting,
    engine,
    qwen2,
    rows_of,
)  # makes the project importable

from components.generate.config import HFRolloutConfig
from components.generate.hf_engine import HFRolloutEngine
from components.weights.publisher import WeightPublisher
from training.tracking.serialization import json_lines

STEPS = 30
"""Number of steps of each run."""
RUN_LIMIT_S = 170
"""Time after which a run is interrupted in seconds, so that the stage ends within its timeout."""
EARLY = 10
"""Number of steps, after the first, that are compared with the later ones."""
RUNS = {
    "grpo, vllm that sleeps, verified": "rollout.verify_weight_sync=true",
    "grpo, vllm that sleeps, not verified": "rollout.verify_weight_sync=false",
}
"""Name of a run -> its option."""
ENVIRONMENTS = {
    "OpenMP defaults": {},
    "as in Ray's actors": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000"},
}
"""Name of an environment -> its variables. libgomp reads them when a process starts."""
ROUNDS = 30
"""Number of rounds of the check `engine`."""


# --- runs -------------------------------------------------------------------------------------------------------------


def runs(setting: Setting, steps: int | None, logs: Path | None) -> Iterator[dict[str, Any]]:
    """Run grpo with and without verification of the weights. Yield the row of each run, and those of its timers."""
    size = check_gpu_runs.GPU if setting.on_gpu else check_gpu_runs.CPU
    size = replace(size, steps=steps or (STEPS if setting.on_gpu else 4))
    sleeping = "rollout.engine=vllm placement.engines_sleep=true placement.learners_sleep=true"
    command = f"grpo {sleeping if setting.on_gpu else 'rollout.engine=hf'}"
    model = setting.folder / "run_model"
    check_gpu_runs.build(model, size)
    for name, option in RUNS.items():
        limit_s = float(setting.sized(RUN_LIMIT_S, 10 * RUN_LIMIT_S))
        row = check_gpu_runs.run(name, f"{command} {option}", size, model, setting.folder, logs, limit_s)
        yield row
        if row["verdict"] in (FAILED, NOT_RUN):
            continue
        metrics = list(json_lines(check_gpu_runs.run_folder(name, setting.folder) / "metrics.jsonl"))
        yield asdict(Row(f"{name}: seconds per step", timer_text(metrics)))
        fallbacks = sum(count for text, count in row["warnings"].items() if "as they were published" in text)
        yield asdict(Row(f"{name}: fallback", f"{fallbacks} warnings of engines that read the folder"))


def timer_text(steps: Sequence[dict[str, float]]) -> str:
    """Return the seconds of each timer of the steps; see `medians_by_age`."""
    names = sorted({name for step in steps for name in step if name.startswith("timing_s/")})
    values = {name: [step.get(name, 0.0) for step in steps] for name in names}
    return "; ".join(f"{name.removeprefix('timing_s/')} {medians_by_age(values[name])}" for name in names)


def medians_by_age(seconds: Sequence[float]) -> str:
    """Return the median of the first EARLY values, the median of the later values, and the maximum.

    The first value is left out if there are others.
    """
    measured = seconds[1:] or seconds
    text = f"{statistics.median(measured[:EARLY]):.3f}"
    if measured[EARLY:]:
        text += f", later {statistics.median(measured[EARLY:]):.3f}"
    return f"{text}, at most {max(measured):.3f}"


# --- experiments --------------------------------------------------------------------------------------------------


def digests(setting: Setting) -> Iterator[Row]:
    """Time digests of host memory by number of threads and OpenMP environment, alone and beside other work."""
    cores = os.cpu_count() or 1
    threads = sorted({1, min(4, cores), min(16, cores)})
    # Variables of the caller would hide the difference between the environments.
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    program = str(ROOT / "scripts" / "digest_seconds.py")
    for name, variables in ENVIRONMENTS.items():
        for where, busy in (("alone", 0), ("beside a busy process", min(16, cores))):
            numbers = map(str, (setting.sized(200, 20), busy, *threads))
            done = subprocess.run(
                [sys.executable, program, *numbers], env=plain | variables, check=True, capture_output=True, text=True
            )
            seconds = json.loads(done.stdout)
            texts = [f"{count} threads {1e3 * each:.2f}" for count, each in zip(threads, seconds, strict=True)]
            yield Row(f"digests on the host, {name}, {where}", f"ms per MiB: {', '.join(texts)}")


def vllm_rounds(setting: Setting) -> Iterator[Row]:
    """Time 30 rounds of sleep, wake for weights, receive and wake of a vLLM engine without a trainer."""
    if importlib.util.find_spec("vllm") is None:
        yield Row("vLLM without a trainer", "vllm is not installed", verdict=NOT_RUN)
        return
    from plugins.vllm.config import VLLMRolloutConfig
    from plugins.vllm.engine import VLLMRolloutEngine

    model = "large"
    if not setting.on_gpu:  # where vLLM has no kernel for the heads of that model
        model = "rounds"
        save_random(setting.folder / model, qwen2(200, 128, 256, layers=2, heads=4, spread=0.12), setting.device)
    trained = engine(setting, model, precision="bf16" if setting.on_gpu else "fp32")
    config = VLLMRolloutConfig(
        dtype="bfloat16" if setting.on_gpu else "float32",
        gpu_memory_utilization=0.7,
        cpu_cache_gb=0.1,
        max_model_len=512,
        enable_sleep=True,
    )
    rollout = VLLMRolloutEngine(setting.folder / model, config)
    publisher = WeightPublisher(setting.folder / "versions")
    parts: dict[str, list[float]] = {"sleep": [], "wake for weights": [], "receive": [], "wake": []}
    count = setting.sized(ROUNDS, 3)
    for version in range(1, count + 1):
        handle = publisher.publish(version, trained.gathered_parameters())
        acts = (
            partial(rollout.sleep, 2),
            partial(rollout.wake, for_weights=True),
            partial(rollout.receive, handle),
            rollout.wake,
        )
        for name, act in zip(parts, acts, strict=True):
            began = time.perf_counter()
            act()
            # Kernels run asynchronously. Without waiting, their time would count for the next part.
            if setting.on_gpu:
                torch.cuda.synchronize()
            parts[name].append(time.perf_counter() - began)
    publisher.close()
    rollout.close()
    texts = [f"{name} {medians_by_age(seconds)}" for name, seconds in parts.items()]
    yield Row(f"vLLM without a trainer, {count} rounds", f"seconds: {'; '.join(texts)}")


def versions(setting: Setting) -> Iterator[Row]:
    """Publish 20 versions in shared memory, which an engine reads. Count the page faults and the new files."""
    trained = engine(setting, "large", precision="bf16" if setting.on_gpu else "fp32")
    rollout = HFRolloutEngine(setting.folder / "large", HFRolloutConfig(precision=trained.config.precision))
    seconds: list[float] = []
    faults: list[int] = []
    files: list[set[int]] = []
    sizes: list[int] = []
    count = setting.sized(20, 4)
    with tempfile.TemporaryDirectory(prefix="check_gpu_", dir="/dev/shm") as place:
        publisher = WeightPublisher(place)
        for version in range(1, count + 1):
            parameters = trained.gathered_parameters()
            began = time.perf_counter()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            handle = publisher.publish(version, parameters)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            seconds.append(time.perf_counter() - began)
            files.append({path.stat().st_ino for path in Path(place).rglob("*") if path.is_file()})
            sizes.append(handle.nbytes)
            rollout.receive(handle)
        publisher.close()
    # Two versions exist at a time. From the third on, a new file means that memory was not reused.
    new_files = [len(later - earlier) for earlier, later in pairwise(files)]
    yield Row(
        f"{count} versions of {sizes[-1]:,} bytes in shared memory",
        f"first two {seconds[0]:.3f} and {seconds[1]:.3f} s, later {statistics.median(seconds[2:]):.3f} s, at most "
        f"{max(seconds[2:]):.3f} s; page faults {faults[0]:,} and {faults[1]:,}, later "
        f"{statistics.median(faults[2:]):,.0f}; new files after the second version {sum(new_files[1:])}",
    )


EXPERIMENTS: dict[str, Check] = {"digests": digests, "engine": vllm_rounds, "versions": versions}
"""Name -> experiment, each run in a separate process."""


def main() -> None:
    """Run the selected checks."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["e"])
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("only", nargs="*", choices=["runs", "fallback", *EXPERIMENTS, []])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--logs", type=Path, help="folder for the logs of each run (default: they are not kept)")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="check_gpu_") as folder:
        setting = Setting(options.device, Path(folder))
        names = options.only or ["runs", *EXPERIMENTS]
        for row in rows_of(machine, setting):
            print(f"row {json.dumps(asdict(row))}", flush=True)
            if row.verdict == FAILED:
                return
        for name, experiment in EXPERIMENTS.items():
            for row in rows_of(experiment, setting) if name in names else ():
                print(f"row {json.dumps(asdict(row))}", flush=True)
        if {"runs", "fallback"} & set(names):
            for row in runs(setting, options.steps, options.logs):
                print(f"row {json.dumps(row)}", flush=True)


if __name__ == "__main__":
    main()
