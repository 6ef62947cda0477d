"""data.curriculum in runs of grpo: bit-equal resume, and fewer samples to a bar with impossible prompts."""

import json
from pathlib import Path

import pytest
from local_runs import run_locally
from safetensors.torch import load_file

from components.models.sources import resolve_model
from plugins.demo.tasks import get_task

BAR = 0.71
"""Score on held-out prompts. The initial model has 0.18. Measured: reached in step 10 with, in step 22 without."""


def write_rows(folder: Path, count: int) -> Path:
    """Write prompts of the sort task. The label of every second one cannot be reached by any response."""
    rows = get_task("sort").rows("train", count, seed=0)
    lines = [
        {"input": row["input"], "label": row["label"] if number % 2 else "0", "number": number}
        for number, row in enumerate(rows)
    ]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def options_of(policy: Path, rows: Path) -> list[str]:
    return f"""model.path={policy} data.path={rows} data.label_key=label data.max_prompt_tokens=16
        reward.source=exact_match samples_per_prompt=8 rollout.max_new_tokens=8 rollout.engine=hf
        train.learning_rate=1e-3 seed=1""".split()


@pytest.mark.full
@pytest.mark.parametrize("curriculum", ["variance", "pools"])
def test_a_resumed_run_with_a_curriculum_is_bit_equal(policy: Path, tmp_path: Path, curriculum: str) -> None:
    words = options_of(policy, write_rows(tmp_path, 64))
    words += f"prompts_per_step=8 max_steps=4 data.curriculum={curriculum} checkpoint.every=2".split()
    options = {"whole": words, "resumed": [*words, f"resume={tmp_path}/whole/checkpoints/step_2"]}
    runs = run_locally("grpo", tmp_path, options)
    steps = [run.run_dir / "checkpoints" / "step_4" for run in runs.values()]
    one, other = (load_file(step / "hf" / "model.safetensors") for step in steps)
    assert all(x.equal(other[name]) for name, x in one.items())
    assert '"curriculum"' in (steps[0] / "state" / "trainer.json").read_text()
    shares = [line["rollout/seen_share"] for line in runs["whole"].lines if line["step"]]
    assert 0 < shares[0] < shares[-1] <= 1


@pytest.mark.nightly
def test_with_half_of_the_prompts_impossible_the_bar_is_reached_in_fewer_samples(tmp_path: Path) -> None:
    words = options_of(Path(resolve_model("warm_start:sort")), write_rows(tmp_path, 192))
    words += [
        "data.epochs=10",
        "prompts_per_step=32",
        "max_steps=40",
        "train.mini_batch_size=64",
        "train.learning_rate=1e-4",
    ]
    words += ["evaluation.path=task:sort", "evaluation.max_samples=256", "evaluation.every=2"]
    runs = run_locally("grpo", tmp_path, {"off": words, "variance": [*words, "data.curriculum=variance"]})
    reached: dict[str, int] = {}
    for name, run in runs.items():
        scores = {line["step"]: line["eval/score"] for line in run.lines if "eval/score" in line}
        print(name, scores)
        reached[name] = next((step for step, score in scores.items() if score >= BAR), 99)
    assert reached["variance"] < reached["off"]
