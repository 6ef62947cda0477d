"""Write docs/race.md from the races in docs/race.json, which scripts/race.py measured.

python scripts/race_page.py            write the page
python scripts/race_page.py --check    exit with 1 if the page is not up to date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORDS = DOCS / "race.json"
PAGE = DOCS / "race.md"
ROWS = {
    "step_s": ("step, s", "{:.3f}"),
    "generation_s": ("generation, s", "{:.3f}"),
    "training_s": ("training, s", "{:.3f}"),
    "sync_s": ("weight sync, s", "{:.3f}"),
    "reward_s": ("reward, s", "{:.3f}"),
    "other_s": ("other, s", "{:.3f}"),
    "generated_tokens_per_s": ("generated tokens/s", "{:,.0f}"),
    "trained_tokens_per_s": ("trained tokens/s", "{:,.0f}"),
    "places": ("computed places per step", "{:,.0f}"),
    "tokens": ("tokens per step", "{:,.0f}"),
    "new_tokens": ("generated tokens per step", "{:,.0f}"),
    "tflops": ("training, TFLOP/s of computed places", "{:.3g}"),
    "effective_tflops": ("training, TFLOP/s, effective", "{:.3g}"),
    "mfu": ("MFU of computed places", "{:.1%}"),
    "effective_mfu": ("effective MFU", "{:.1%}"),
    "cpu_s": ("CPU, s per step", "{:.2f}"),
    "host_gb": ("peak host memory, GB", "{:.2f}"),
    "gpu_gb": ("peak GPU memory, GB", "{:.1f}"),
}
"""Measurement -> its name in a table, and its format."""
ENGINES = {
    "transformers": ("Troupe, hf", "TRL, transformers"),
    "vllm": ("Troupe, vLLM", "TRL, vLLM colocated"),
}
"""Generation engine -> titles of both sides."""
INTRODUCTION = """# Race with TRL

After this page you know how a training step of recipes/grpo compares with one of TRL's GRPOTrainer on the same machine,
and how to measure it on yours.

`scripts/race.py` runs both alternately (Troupe, TRL, Troupe, TRL), one process at a time. Both sides have the same
model with random weights, prompts, reward and response lengths, and the same updates: one optimizer step per training
step over all responses, AdamW with the same learning rate, betas and clipping, the same clip range, no KL. Everything
else is the default of each side. TRL has no checkpointing of activations, the fastest size of micro-batch of a few, and
a vLLM that does not sleep, because it would read its weights from disk after each sleep. TRL's correction for the
difference between vLLM and the trainer is off, because it takes a forward pass that recipes/grpo does not make.

```bash
python scripts/race.py tiny --out docs/race.json                              # a minute on a CPU
python scripts/race.py 0.5b 1.5b --engine vllm transformers --out docs/race.json   # on a GPU
python scripts/race_page.py                                                   # write this page
```

The second command needs `bash scripts/setup.sh vllm` and a GPU that nothing else uses. TRL is installed into an
environment of its own in the cache folder; `--trl_python PATH` uses another one. `--options` passes options to
recipes/grpo, `--trl_options` to TRL's GRPOConfig, both of which are stored with the result.
"""
NO_GPU = """
**No race on a GPU has been run.** The results below come from a CPU and a model of 0.4 million parameters; they do
not apply to a GPU. The second command above makes the missing rows.
"""
METHOD = """
## How it is measured

- **Step**: wall time from the end of one step to the end of the next, so nothing is left out. All values are medians of
  the steps after the second, then over the runs of a side. `other` is the step without the phases above it.
- **Load**: with a load average above the number of cores, other processes took time from both sides, and seconds are
  unreliable. The range of the ratio over all pairs shows how much; CPU seconds depend less on it.
- **Phases**: `timing_s/*` of recipes/grpo, and timers around the methods of TRL's trainer that do the same. `training`
  includes the optimizer step. With transformers TRL generates with the weights that it trains, so it has no weight
  sync.
- **Lengths**: both sides load the same files and have the same maximum. On a CPU, the weights of a case with a fixed
  length are such that the end token is never sampled. On a GPU it is one of 151,936 tokens, which a model with random
  weights samples once in 150,000 tokens. The number of generated tokens is in each table.
- **Computed places**: positions that every layer computes. recipes/grpo packs rows and computes a prompt once for its
  responses in a micro-batch. TRL pads rows, and computes a prompt for each response.
- **MFU** has one formula for both sides (`training_flops` of `plugins/utilisation/utilisation.py`): 6 operations per
  parameter and place and those of causal attention, without recomputation, divided by the seconds of training and the
  vendor's figure for dense bfloat16. `effective` counts the tokens of separate sequences in place of the computed
  places, so it compares speed on the same work. A CPU has no such figure; its tables have TFLOP/s.
- **Memory**: the highest value of a run, start-up included. Host: proportional set size of all processes, Ray
  included, five times per second at most. GPU: memory in use by nvidia-smi, twice per second.

## Not raced

verl and OpenRLHF. Both need GPUs for their trainers, and verl 0.9.1 excludes versions of packages that this project
needs. Their losses and updates are compared in [differences](differences.md).

Larger cases on a CPU are in [benchmarks](benchmarks.md#the-cost-of-a-grpo-step-compared-with-trl).
"""


def comparison(record: Mapping[str, Any]) -> str:
    """Return the table of a race as Markdown."""
    sides = [record["sides"]["troupe"], record["sides"]["trl"]]
    titles = ENGINES[record["engine"]]
    lines = [f"| | {titles[0]} | {titles[1]} |", "|---|---|---|"]
    for name, (title, shown) in ROWS.items():
        if any(name in side for side in sides):
            cells = [shown.format(side[name]) if name in side else "" for side in sides]
            lines.append(f"| {title} | {cells[0]} | {cells[1]} |")
    ratio = record["step_ratio"]
    runs = f"{ratio['median']:.2f} ({ratio['min']:.2f} .. {ratio['max']:.2f})"
    lines.append(f"| step of TRL / step of Troupe, median of the pairs (range) | {runs} | |")
    return "\n".join(lines) + "\n"


def section(record: Mapping[str, Any]) -> str:
    """Return the section of a race."""
    settings = record["settings"]
    setting = f", threads: {record['threads']}" if record["threads"] else ""
    # Processes beside the race, which make all times longer.
    setting += f", load average {record['load']:.1f} at the start"
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    options = [*settings["options"], *(f"TRL's {name}={value}" for name, value in settings["trl_options"].items())]
    parts = [
        f"{record['device']}{setting}; {record['day']}, commit {record['commit']}; {versions}.",
        f"{settings['prompts_per_step']} prompts x {settings['samples_per_prompt']} responses per step,",
        f"{settings['steps']} steps, {record['pairs']} runs of each side;",
        f"TRL has {settings['trl_rows']} rows in a micro-batch; recipes/grpo with backend={settings['backend']}.",
    ]
    if options:
        parts.append(f"Further options: {', '.join(options)}.")
    return f"\n### {record['title']}, {record['engine']}\n\n{' '.join(parts)}\n\n{comparison(record)}"


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the page."""
    has_gpu = any(not record["device"].startswith("CPU") for record in records)
    sections = "".join(section(record) for record in records)
    return INTRODUCTION + ("" if has_gpu else NO_GPU) + "\n## Results\n" + sections + METHOD


def main() -> int:
    """Write the page, or with --check compare it. Return the exit code."""
    text = page(json.loads(RECORDS.read_text(encoding="utf-8")))
    if "--check" in sys.argv:
        return int(text != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
