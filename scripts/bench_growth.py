"""Measure how the cost of a step of recipes/grpo grows with its size, and the trainer process's share of it.

    python scripts/bench_growth.py                     all benchmarks, about half an hour on two cores
    python scripts/bench_growth.py prompts response    some of them: prompts, samples, prompt, response, engines, ranks

It runs on Ray with one thread per process, fixed lengths, and a model of 0.4 million parameters (5,000 for engines and
ranks). One number grows. The others stay at 64 prompts of 16 tokens with 8 responses of 16 tokens each. Values are
medians of the steps after the second.

Columns: CPU seconds of all processes of the run per step; wall seconds of generation and of training; CPU time per
token relative to the first row; and the share of the trainer process, which reads prompts, computes advantages, sends
batches and logs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import string
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from race_cases import SHARE_OF_A, suppress_end_token  # also makes the project importable
from transformers import Qwen2Config, Qwen2ForCausalLM
from watch_process import watched

from plugins.demo.tiny_model import character_tokenizer, tiny_model

WARM_UP = 2
STEPS = 6


@dataclass(frozen=True)
class Case:
    """Size of a step, and number of engines and ranks."""

    prompts: int = 64
    samples: int = 8
    prompt: int = 16
    """Number of tokens per prompt."""
    response: int = 16
    """Number of tokens per response."""
    engines: int = 1
    ranks: int = 1

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences."""
        return self.prompts * self.samples * (self.prompt + self.response)


SMALL = Case(prompts=32)
GROWING = {
    "prompts": [Case(prompts=n) for n in (64, 256, 1024)],
    "samples": [Case(samples=n) for n in (4, 16, 64)],
    "prompt": [Case(prompt=n) for n in (8, 128, 1024)],
    "response": [Case(response=n) for n in (16, 128, 512)],
    "engines": [replace(SMALL, engines=n) for n in (2, 4, 8)],
    "ranks": [replace(SMALL, ranks=n) for n in (2, 4, 8)],
}


def write_model(folder: Path, is_stub: bool) -> Path:
    """Write an untrained model that never samples its end token, and return its folder.

    Every response then has the full length.
    """
    tokenizer = character_tokenizer(string.ascii_lowercase)
    model = tiny_model(tokenizer, 0)
    if is_stub:
        stub = Qwen2Config(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            vocab_size=len(tokenizer),
            tie_word_embeddings=True,
        )
        model = Qwen2ForCausalLM(stub)
    model.config.max_position_embeddings = 2048
    suppress_end_token(model, tokenizer)
    path = folder / ("stub" if is_stub else "tiny")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def measure(case: Case, model: Path, folder: Path) -> list[dict[str, float]]:
    """Run grpo once. Return the metrics and CPU seconds of its steps."""
    letters = random.Random(0)
    rows = [{"input": "".join(letters.choices(string.ascii_lowercase, k=case.prompt)), "label": "a"} for _ in range(99)]
    data = folder / "prompts.jsonl"
    reward = folder / "reward.py"
    count = case.prompts * STEPS
    data.write_text("".join(json.dumps(rows[i % len(rows)]) + "\n" for i in range(count)), encoding="utf-8")
    reward.write_text(SHARE_OF_A, encoding="utf-8")
    with tempfile.TemporaryDirectory(dir=folder) as run_dir:
        options = {
            "run_dir": run_dir,
            "model.path": model,
            "data.path": data,
            "data.label_key": "label",
            "data.max_prompt_tokens": 1024,
            "reward.source": reward,
            "prompts_per_step": case.prompts,
            "samples_per_prompt": case.samples,
            "rollout.max_new_tokens": case.response,
            "rollout.engine": "hf",
            "placement.rollout_engines": case.engines,
            "placement.actor_ranks": case.ranks,
            "train.learning_rate": 1e-6,
        }
        command = [sys.executable, "-m", "recipes.grpo.main", *(f"{name}={value}" for name, value in options.items())]
        metrics = Path(run_dir) / "metrics.jsonl"
        threads = {"OMP_NUM_THREADS": "1"}
        steps = watched(command, metrics, folder / "run.log", threads, lambda: trainer_seconds(Path(run_dir)))
    return [row for row in steps if row["step"] and "trainer" in row]


def trainer_seconds(run_dir: Path) -> dict[str, float]:
    """Return the CPU seconds of the trainer's process. Empty if the process has ended."""
    started_line = re.search(r": process (\d+) on ", (run_dir / "logs" / "trainer-0.log").read_text(encoding="utf-8"))
    assert started_line is not None
    try:
        # The fields are counted from the last parenthesis, because the name before it may contain spaces.
        fields = Path(f"/proc/{started_line[1]}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {"trainer": sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")}


def main() -> None:
    """Print a table per selected benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", nargs="*", choices=[*GROWING, []], help="benchmarks to run (default: all)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {is_stub: write_model(folder, is_stub) for is_stub in (False, True)}
        for bench in options.benches or GROWING:
            print(
                f"\n| {bench} | CPU s | generate, s | train, s | CPU per token | trainer |\n|---|---|---|---|---|---|"
            )
            first = 0.0
            for case in GROWING[bench]:
                # Many processes share the cores, so the benchmarks of engines and ranks have the smaller model.
                steps = measure(case, models[bench in ("engines", "ranks")], folder)
                # CPU seconds are counters of the whole run. A step is the difference between two rows.
                pairs = list(zip(steps[WARM_UP - 1 :], steps[WARM_UP:], strict=False))
                cpu = statistics.median(after["cpu"] - before["cpu"] for before, after in pairs)
                trainer = statistics.median(after["trainer"] - before["trainer"] for before, after in pairs)
                phases = [
                    statistics.median(after[f"timing_s/{phase}"] for _, after in pairs)
                    for phase in ("generate", "train")
                ]
                first = first or cpu / case.tokens
                seconds = " | ".join(f"{each:.2f}" for each in phases)
                share = f"{cpu / case.tokens / first:.2f} | {100 * trainer / cpu:.1f}%"
                print(f"| {getattr(case, bench)} | {cpu:.2f} | {seconds} | {share} |", flush=True)


if __name__ == "__main__":
    main()
