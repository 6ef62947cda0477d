"""Each piece of advice is applied to a run on a CPU that was built for it, and the step becomes faster."""

import json
import re
import statistics
from pathlib import Path

import pytest

from recipes.grpo.main import main

pytestmark = [pytest.mark.full, pytest.mark.nightly]

SLOW_REWARD = """
import time

def reward_func(queries, prompts, labels):
    time.sleep(0.01 * len(queries))
    return [float(len(query) % 2) for query in queries]
"""
SIZES = "prompts_per_step=16 samples_per_prompt=8 rollout.max_new_tokens=12 max_steps=6 data.max_samples=128"
COMMON = f"data.path=task:sort data.max_prompt_tokens=16 {SIZES}"
CASES = {
    "rollout.max_num_seqs": "rollout.max_num_seqs=4",
    "reward.workers": "reward.source=FOLDER/reward.py",
}
"""Option that the summary is to name -> options of a run with that fault."""


def step_seconds(run_dir: Path) -> float:
    """Return the median seconds of a step, without the first two, which allocate memory."""
    rows = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["timing_s/step"] for row in rows if row.get("step", 0) > 2)


@pytest.mark.parametrize("option", CASES)
def test_run_is_faster_with_the_option_that_its_summary_names(
    option: str, model_with_tokenizer: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward.py").write_text(SLOW_REWARD)
    words = f"{COMMON} {CASES[option]}".replace("FOLDER", str(tmp_path)).split()
    # The last value of an option counts, so that each option is there once.
    options = [f"model.path={model_with_tokenizer}", *{word.partition("=")[0]: word for word in words}.values()]
    assert main([*options, f"run_dir={tmp_path / 'before'}"]) == 0
    advice = re.search(rf"try ({option}=\S+)", capfd.readouterr().out)
    assert advice is not None
    kept = [each for each in options if each.partition("=")[0] != option]
    assert main([*kept, advice[1], f"run_dir={tmp_path / 'after'}"]) == 0
    assert step_seconds(tmp_path / "after") < 0.95 * step_seconds(tmp_path / "before")
