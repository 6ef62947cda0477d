"""The two sides of scripts/race.py: their processes, and the measurements of a run in one format."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from race_cases import ROOT, Case, model_path, prompts_file, reward_file  # makes the project importable
from watch_process import gpu_memory, watched

from components.batch.reading import load_batch
from components.models.packing.layout import PADDED, ComputedTokens
from components.net.hub import cache_root
from plugins.prefix_sharing.shared_prompts import SharedPrompts

TRL = "1.16.0"
WARM_UP = 2
"""Number of steps of a run that are not measured."""
LEARNING_RATE = 1e-6
ENGINES = {"transformers": ("hf", "transformers"), "vllm": ("vllm", "vllm")}
"""Generation engine of a race -> its name in rollout.engine, and in TRL."""
PHASES = ("generation", "training", "sync", "reward")
TIMERS = {
    "generation": "timing_s/generate",
    "training": "timing_s/train",
    "sync": "timing_s/sync",
    "reward": "timing_s/reward",
}
"""Phase -> metric of recipes/grpo."""


@dataclass(frozen=True)
class RaceSettings:
    """Options of a race besides its case."""

    engine: str
    """Key of ENGINES."""
    device: str
    """`cuda` or `cpu`."""
    threads: int = 0
    """Threads of each process for products. 0 leaves the libraries' defaults."""
    backend: str = "ray"
    """Backend of recipes/grpo."""
    trl_python: Path = Path(sys.executable)
    rows: int = 0
    """Number of rows in a micro-batch of TRL."""
    options: Sequence[str] = ()
    """Further options of recipes/grpo, as key=value."""
    trl_options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of TRL's GRPOConfig."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of both sides."""
        env = {"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}
        return env if self.device == "cuda" else env | {"CUDA_VISIBLE_DEVICES": ""}


def trl_environment() -> Path:
    """Return the Python of TRL's environment, created if missing. It imports shared packages from ours."""
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
    # Both sides then run the same torch and transformers.
    (packages / "shared.pth").write_text(ours + "\n", encoding="utf-8")
    install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), f"trl=={TRL}"]
    subprocess.run(install, check=True)
    # Written last: an installation that was interrupted is repeated.
    done.write_text(ours, encoding="utf-8")
    return python


def run_troupe(case: Case, settings: RaceSettings, folder: Path) -> dict[str, float]:
    """Run recipes/grpo once and return its medians."""
    with tempfile.TemporaryDirectory(dir=folder) as run_dir:
        options = {
            "run_dir": run_dir,
            "backend": settings.backend,
            "resume": "none",
            "model.path": model_path(case, folder),
            "data.path": prompts_file(case, folder),
            "data.label_key": "label",
            "data.max_samples": case.prompts * case.steps,
            "reward.source": "sort" if case.warm_start else reward_file(folder),
            "prompts_per_step": case.prompts,
            "samples_per_prompt": case.samples,
            "rollout.engine": ENGINES[settings.engine][0],
            "rollout.max_new_tokens": case.max_new_tokens,
            "train.learning_rate": LEARNING_RATE,
        }
        arguments = [*(f"{name}={value}" for name, value in options.items()), *settings.options]
        command = [sys.executable, "-m", "recipes.grpo.main", *arguments]
        rows_path = Path(run_dir) / "metrics.jsonl"
        with gpu_memory(folder / "memory.txt") as gpu_bytes:
            rows = watched(command, rows_path, folder / "troupe.log", settings.environment)
        steps = [troupe_step(row, Path(run_dir)) for row in rows if TIMERS["training"] in row]
    return medians(steps, gpu_bytes)


def troupe_step(row: dict[str, float], run_dir: Path) -> dict[str, float]:
    """Return the measurements of a step of recipes/grpo, from its metrics and its stored rollouts."""
    batch = load_batch(run_dir / "rollouts" / f"step_{int(row['step']):06d}.parquet")
    train = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))["train"]
    # The layout that the engine computes with; see TrainEngine.train_step.
    layout = PADDED if train["packing"] is False else SharedPrompts()
    plans = layout.micro_batches_by_rank(batch, 1, train["max_tokens"])
    places, pairs = layout.computed_tokens(batch, plans)
    return {
        **{name: row[name] for name in ("time", "cpu", "host_bytes")},
        **{f"{phase}_s": row.get(metric, 0.0) for phase, metric in TIMERS.items()},
        "places": places,
        "pairs": pairs,
        "tokens": batch.num_tokens,
        "token_pairs": int(batch.lengths.square().sum()),
        "new_tokens": int(batch["action_mask"].sum()),
    }


def run_trl(case: Case, settings: RaceSettings, folder: Path, steps: int = 0) -> dict[str, float]:
    """Run TRL once and return its medians."""
    with tempfile.TemporaryDirectory(dir=folder) as run_dir:
        values: dict[str, Any] = {
            "folder": run_dir,
            "model": model_path(case, folder),
            "prompts": str(prompts_file(case, folder)),
            "prompts_per_step": case.prompts,
            "samples_per_prompt": case.samples,
            "max_new_tokens": case.max_new_tokens,
            "max_length": case.prompt_tokens + case.max_new_tokens,
            "reward": "match" if case.warm_start else "share",
            "learning_rate": LEARNING_RATE,
            "steps": steps or case.steps,
            "engine": ENGINES[settings.engine][1],
            "rows": settings.rows,
            "threads": settings.threads,
            "options": dict(settings.trl_options),
        }
        path = Path(run_dir) / "settings.json"
        path.write_text(json.dumps(values), encoding="utf-8")
        command = [str(settings.trl_python), str(ROOT / "scripts" / "race_trl.py"), str(path)]
        rows_path = Path(run_dir) / "steps.jsonl"
        with gpu_memory(folder / "memory.txt") as gpu_bytes:
            rows = watched(command, rows_path, folder / "trl.log", settings.environment)
    return medians(rows, gpu_bytes)


def medians(steps: Sequence[Mapping[str, float]], gpu_bytes: Sequence[int] = ()) -> dict[str, float]:
    """Return the medians of the steps after the warm-up, and the peak memory of the run.

    A step lasts from the end of one step to the end of the next, so nothing is left out. `other_s` is the part of it
    that belongs to no phase.

    Raises:
        ValueError: the run has too few steps.
    """
    pairs = list(zip(steps[WARM_UP - 1 :], steps[WARM_UP:], strict=False))
    if not pairs:
        raise ValueError(f"the run has {len(steps)} steps; it needs {WARM_UP + 1} or more, of which {WARM_UP} warm up")
    measured: list[dict[str, float]] = []
    for before, after in pairs:
        wall = after["time"] - before["time"]
        seconds = {f"{phase}_s": after.get(f"{phase}_s", 0.0) for phase in PHASES}
        measured.append(
            {
                "step_s": wall,
                **seconds,
                "other_s": wall - sum(seconds.values()),
                "cpu_s": after["cpu"] - before["cpu"],
                "generated_tokens_per_s": after["new_tokens"] / seconds["generation_s"],
                "trained_tokens_per_s": after["tokens"] / seconds["training_s"],
                **{name: after[name] for name in ("places", "pairs", "tokens", "token_pairs", "new_tokens")},
            }
        )
    result = {name: statistics.median(row[name] for row in measured) for name in measured[0]}
    result["host_gb"] = max(row["host_bytes"] for row in steps) / 1e9
    if gpu_bytes:
        result["gpu_gb"] = max(gpu_bytes) / 1e9
    return result


def computed_tokens(medians_of_run: Mapping[str, float]) -> tuple[ComputedTokens, ComputedTokens]:
    """Return what a run computed in a step, and what separate sequences without padding would take."""
    run = medians_of_run
    return (
        ComputedTokens(int(run["places"]), int(run["pairs"])),
        ComputedTokens(int(run["tokens"]), int(run["token_pairs"])),
    )
