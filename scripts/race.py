"""Race recipes/grpo against TRL's GRPOTrainer on this machine, in turns, with the same work on both sides.

    python scripts/race.py tiny                                  a minute on a CPU
    python scripts/race.py natural fixed64 --threads 1 2         other cases; --help lists them
    python scripts/race.py 0.5b --engine vllm transformers --out docs/race.json     on a GPU
    python scripts/race_page.py                                  write docs/race.md from docs/race.json

A pair is one process of each side, recipes/grpo first. Both have the same model with random weights, prompts, reward,
response lengths and number of optimizer steps (one per training step, over all responses), AdamW with the same learning
rate, betas and clipping, and no KL. The first two steps of each run are not measured. recipes/grpo runs with its
defaults for the device. TRL runs with vLLM in the trainer's process or with transformers' generate. It gets a separate
environment in the cache folder, which uses our torch and transformers, and the fastest of a few micro-batch sizes.

It prints a table, and writes or updates the races in --out: medians over the steps, then over the runs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch
from race_cases import CASES, ROOT, Case, model_path  # also makes the project importable
from race_page import comparison
from race_sides import (
    ENGINES,
    LEARNING_RATE,
    TRL,
    WARM_UP,
    RaceSettings,
    computed_tokens,
    run_trl,
    run_troupe,
    trl_environment,
)

from plugins.utilisation.utilisation import peak_flops, training_flops

SIDES = ("troupe", "trl")
PACKAGES = ("torch", "transformers", "vllm", "ray", "deepspeed")


def race(name: str, settings: RaceSettings, pairs: int, folder: Path) -> dict[str, Any]:
    """Run a case, one process of each side after the other. Return its record for the JSON file."""
    case = CASES[name]
    # Before the runs, which are themselves a load: a busy machine makes a race worthless.
    load = os.getloadavg()[0]
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(pairs):
        runs["troupe"].append(run_troupe(case, settings, folder))
        runs["trl"].append(run_trl(case, settings, folder))
        print(f"{name}, pair {number + 1} of {pairs}: {seconds_of(runs)}", flush=True)
    model = model_path(case, folder)
    sides = {side: with_utilisation(median_of(runs[side]), model, settings.device) for side in SIDES}
    # Within pairs, because the speed of a machine changes from one pair to the next.
    ratios = [other["step_s"] / ours["step_s"] for ours, other in zip(*runs.values(), strict=True)]
    return {
        "case": name,
        "title": case.title,
        "engine": settings.engine,
        "device": device_name(settings.device),
        "day": str(date.today()),
        "commit": commit(),
        "versions": versions(settings.trl_python),
        "threads": settings.threads,
        "load": load,
        "pairs": pairs,
        "settings": describe(case, settings),
        "sides": sides,
        "step_ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }


def seconds_of(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return the seconds per step of the last pair."""
    return ", ".join(f"{side} {measured[-1]['step_s']:.2f} s a step" for side, measured in runs.items())


def median_of(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each measurement over the runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def with_utilisation(run: Mapping[str, float], model: str, device: str) -> dict[str, float]:
    """Add the operations per second of training, by one formula for both sides, and their share of the peak.

    `tflops` counts the places that were computed: padding, and a prompt once for each time it was computed.
    `effective_tflops` counts separate sequences without padding, so it is proportional to the speed on the same work.
    """
    peak = peak_flops(torch.cuda.get_device_name()) if device == "cuda" else None
    result = dict(run)
    for prefix, computed in zip(("", "effective_"), computed_tokens(run), strict=True):
        flops = training_flops(meta_model(model), computed)
        assert flops is not None  # no case has a mixture of experts
        result[f"{prefix}tflops"] = flops / run["training_s"] / 1e12
        if peak is not None:
            result[f"{prefix}mfu"] = flops / run["training_s"] / peak
    return result


@cache
def meta_model(path: str) -> Any:
    """Return the model without its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))


def describe(case: Case, settings: RaceSettings) -> dict[str, Any]:
    """Return the sizes and options of a race."""
    return {
        "prompts_per_step": case.prompts,
        "samples_per_prompt": case.samples,
        "prompt_tokens": case.prompt_tokens,
        "max_new_tokens": case.max_new_tokens,
        "fixed_length": case.fixed_length,
        "steps": case.steps,
        "warm_up_steps": WARM_UP,
        "optimizer_steps_per_step": 1,
        "learning_rate": LEARNING_RATE,
        "backend": settings.backend,
        "trl_rows": settings.rows,
        "options": list(settings.options),
        "trl_options": dict(settings.trl_options),
    }


def device_name(device: str) -> str:
    """Return the name of the GPU, or the number of cores."""
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {os.cpu_count()} cores"


def versions(trl_python: Path) -> dict[str, str]:
    """Return the versions of Python and the packages that both sides use, and of TRL."""
    known = {"python": platform.python_version(), "trl": TRL}
    query = [str(trl_python), "-c", "import importlib.metadata as m; print(m.version('trl'))"]
    known["trl"] = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    names = {each.metadata["Name"] for each in importlib.metadata.distributions()}
    return known | {name: importlib.metadata.version(name) for name in PACKAGES if name in names}


def commit() -> str:
    """Return the short hash of the commit, with + if files have changed since, or "" outside of a repository."""
    query = ["git", "describe", "--always", "--dirty=+", "--abbrev=9", "--exclude=*"]
    done = subprocess.run(query, cwd=ROOT, check=False, capture_output=True, text=True)
    return done.stdout.strip()


def fastest_rows(case: Case, settings: RaceSettings, folder: Path) -> int:
    """Return the size of micro-batch with which TRL has the shortest step."""
    if len(case.trl_rows) == 1:
        return case.trl_rows[0]
    # Two measured steps are enough to compare sizes, which differ by much more than two steps of one size.
    seconds = {
        rows: run_trl(case, replace(settings, rows=rows), folder, steps=WARM_UP + 2)["step_s"] for rows in case.trl_rows
    }
    return min(seconds, key=lambda rows: seconds[rows])


def store(path: Path, record: dict[str, Any]) -> None:
    """Add a race to the JSON file. It replaces an earlier one of the same case, engine, device and threads."""
    key = ("case", "engine", "device", "threads")
    records: list[dict[str, Any]] = []
    if path.exists():
        records = json.loads(path.read_text(encoding="utf-8"))
    records = [each for each in records if any(each[name] != record[name] for name in key)]
    path.write_text(json.dumps([*records, record], indent=1) + "\n", encoding="utf-8")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=list(CASES), help="cases to race")
    parser.add_argument(
        "--engine", nargs="+", choices=list(ENGINES), default=["transformers"], help="generation engines"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if torch sees a GPU")
    parser.add_argument("--threads", type=int, nargs="+", help="threads of both sides (default: on a CPU one per core)")
    parser.add_argument("--pairs", type=int, default=3, help="number of runs of each side (default: 3)")
    parser.add_argument("--rows", type=int, help="rows in a micro-batch of TRL (default: the fastest of a few)")
    parser.add_argument("--backend", choices=("ray", "local"), default="ray", help="backend of recipes/grpo")
    parser.add_argument("--trl_python", type=Path, help=f"Python with TRL (default: an environment with TRL {TRL})")
    parser.add_argument("--options", nargs="+", default=[], metavar="KEY=VALUE", help="further options of recipes/grpo")
    parser.add_argument("--trl_options", type=json.loads, default={}, help="further options of GRPOConfig, as JSON")
    parser.add_argument("--out", type=Path, help="JSON file for the results; other races in it are kept")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; set --device cpu")
    if options.device == "cpu" and "vllm" in options.engine:
        parser.error("--engine vllm: TRL cannot load weights into vLLM's packed weights on a CPU; race it on a GPU")
    options.threads = options.threads or [0 if options.device == "cuda" else os.cpu_count() or 1]
    return options


def main() -> None:
    """Run the selected races, print them, and store their results."""
    options = parsed()
    trl_python = options.trl_python or trl_environment()
    for name in options.cases:
        with tempfile.TemporaryDirectory(prefix="race_") as place:
            folder = Path(place)
            for engine in options.engine:
                settings = RaceSettings(
                    engine,
                    options.device,
                    max(options.threads),
                    options.backend,
                    trl_python,
                    options=options.options,
                    trl_options=options.trl_options,
                )
                settings = replace(settings, rows=options.rows or fastest_rows(CASES[name], settings, folder))
                for threads in options.threads:
                    record = race(name, replace(settings, threads=threads), options.pairs, folder)
                    print("\n" + comparison(record), flush=True)
                    if options.out is not None:
                        store(options.out, record)


if __name__ == "__main__":
    sys.exit(main())
