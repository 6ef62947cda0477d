"""Write the table of the options that the plan chooses for published models on common GPUs.

    python scripts/golden_plans.py            write tests/plugins/choices/golden_plans.md
    python scripts/golden_plans.py --check    exit with 1 if the table is not up to date

Each row is a run of recipes/grpo with 256 prompts x 8 responses per step and the defaults of gpu.yaml. Only config.json
of the model is read. A change of the memory plan or of the choice shows as changed rows.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

from plan_table import MODELS, written  # noqa: E402 (may not be installed)

from plugins.assumed_machines.machines import Machines, assuming  # noqa: E402
from plugins.choices.choose import choose  # noqa: E402
from recipes.grpo.main import COMMAND  # noqa: E402
from training.launch.plan import Plan  # noqa: E402
from training.options.config import CommandLine  # noqa: E402

PAGE = ROOT / "tests/plugins/choices/golden_plans.md"
NAMES = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-32B", "Qwen2.5-72B")
CARDS = (40, 80, 141)
"""Memory of a GPU in GB, smallest first."""
GPUS = (1, 8)
LENGTHS = ((100, 200), (1000, 8000))
"""Maximum numbers of tokens of a prompt and of a response."""
PARALLEL = {("Qwen2.5-32B", 8): 4, ("Qwen2.5-72B", 8): 8}
"""`rollout.tensor_parallel`, which the plan does not choose."""
HEAD = (
    *("model", "GPUs", "tokens", "GB", "fits", "sleep", "checkpointing", "zero_stage", "max_tokens", "max_num_seqs"),
    *("gpu_memory", "peak GB"),
)
INTRODUCTION = """# Options that the plan chooses

Written by scripts/golden_plans.py; do not edit. Each row is a run of recipes/grpo with 256 prompts x 8 responses per
step. `tokens`: prompt + response. `GB`: memory of a GPU. `peak GB`: maximum memory of a GPU by the plan. Where nothing
fits, the options need the least memory, and the run is refused or has a warning.
"""


@dataclass(frozen=True)
class Case:
    """A run on GPUs."""

    model: str
    gpus: int
    lengths: tuple[int, int]
    card: int
    """Memory of a GPU in GB."""

    def plan(self, folder: Path) -> Plan:
        """Return the plan of the run with the chosen options.

        Args:
            folder: a folder for the config.json of the model.
        """
        (folder / "config.json").write_text(json.dumps(MODELS[self.model] | {"max_position_embeddings": 32768}))
        prompt, response = self.lengths
        arguments = [f"model.path={folder}", "data.path=task:sort", "prompts_per_step=256", "rollout.engine=vllm"]
        arguments += [f"data.max_prompt_tokens={prompt}", f"rollout.max_new_tokens={response}", "dry_run=true"]
        arguments.append(f"rollout.tensor_parallel={PARALLEL.get((self.model, self.gpus), 1)}")
        command_line = CommandLine(COMMAND.schema, arguments)
        with assuming(Machines.parse(f"{self.gpus}x1x{self.card}GB")):
            requested = COMMAND.requested_config(command_line)
            first = COMMAND.plan(requested, command_line)
            return choose(first, requested, lambda changed: COMMAND.plan(changed, command_line))


def cases() -> Iterator[Case]:
    """Yield all runs. Those that differ only in the memory of a GPU follow each other, the smallest first."""
    for model in NAMES:
        for gpus in GPUS:
            for lengths in LENGTHS:
                for card in CARDS:
                    yield Case(model, gpus, lengths, card)


def gpu_places(plan: Plan) -> list[dict[str, Any]]:
    """Return the memory pools of the GPUs of a plan, as in plan.json."""
    assert plan.memory is not None
    return [place for place in plan.memory.fields()["places"] if place["place"].startswith("a GPU")]


def row(case: Case, plan: Plan) -> list[object]:
    """Return the cells of a run."""
    config = plan.config
    peak = max(place["most"] for place in gpu_places(plan))
    fits = "yes"
    # The text with which the choice falls back to the least memory.
    if "nothing faster fits" in " ".join(plan.chosen):
        fits = "no"
    train = config.train
    cells = [config.placement.engines_sleep, train.gradient_checkpointing, train.zero_stage, train.max_tokens]
    cells += [config.rollout.max_num_seqs, config.rollout.gpu_memory]
    shown = [{True: "yes", False: "no", None: "default"}.get(cell, cell) for cell in cells[:2]]
    prompt, response = case.lengths
    lengths = f"{prompt} + {response}"
    share = cells[-1] or "default"
    return [case.model, case.gpus, lengths, case.card, fits, *shown, *cells[2:-1], share, round(peak / 1e9)]


def plans() -> dict[Case, Plan]:
    """Return the plans of all runs."""
    with tempfile.TemporaryDirectory() as folder:
        return {case: case.plan(Path(folder)) for case in cases()}


def page(of_cases: dict[Case, Plan]) -> str:
    """Return the text of the page."""
    return f"{INTRODUCTION}\n{written(HEAD, iter([row(case, plan) for case, plan in of_cases.items()]))}\n"


def main() -> int:
    """Write the page, or with --check compare it. Return the exit code."""
    text = page(plans())
    if "--check" in sys.argv:
        return int(not PAGE.is_file() or text != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
