"""checkpoint.export=best and max_steps in a supervised run."""

import json
import re
from pathlib import Path

import pytest
from local_runs import run_locally
from safetensors.torch import load_file

from tests.messages import says

SHORT = """data.path=task:sort data.max_samples=240 data.max_tokens=16 evaluation.held_out=40 train.batch_size=20
    train.learning_rate=1e-3 train.lr_warmup_ratio=0.1 train.zero_stage=2 evaluation.every=1 checkpoint.export=best
    checkpoint.keep=1 max_steps=4 seed=1"""


@pytest.mark.full
def test_a_run_ends_after_max_steps_and_exports_its_best_step(policy: Path, tmp_path: Path) -> None:
    # After a few steps with this learning rate the loss rises, so the best step is not the last one.
    options = {
        "whole": ["checkpoint.every=2"],
        "resumed": [f"resume={tmp_path}/whole/checkpoints/step_2"],
    }
    options = {
        name: [f"model.path={policy}", *SHORT.split(), f"checkpoint.export_path={tmp_path}/export_{name}", *extra]
        for name, extra in options.items()
    }
    options["whole"][-1:] = ["checkpoint.every=2", "checkpoint.keep=9"]
    runs = run_locally("dpo", tmp_path, options)
    whole = runs["whole"]
    assert [line["step"] for line in whole.lines if line["step"]] == [1, 2, 3, 4]
    # The schedule ends at max_steps. Over all ten steps of the data, the rate would be above 0.8e-3 here.
    assert whole.lines[-1]["actor/learning_rate"] < 0.4e-3
    losses = {line["step"]: -line["eval/accuracy"] for line in whole.lines if "eval/loss" in line}
    best = min(losses, key=lambda step: (losses[step], step))
    assert (whole.run_dir / "checkpoints" / "best").read_text().strip() == f"step_{best}"
    assert re.search(says(f"step_{best} is exported"), whole.out)
    expected = load_file(whole.run_dir / "checkpoints" / f"step_{best}" / "hf" / "model.safetensors")
    exported = load_file(tmp_path / "export_whole" / "model.safetensors")
    assert all(exported[name].equal(x) for name, x in expected.items())
    assert json.loads((whole.run_dir / "summary.json").read_text())["score"]["best"] == -losses[best]
    last = [run.run_dir / "checkpoints" / "step_4" / "hf" / "model.safetensors" for run in runs.values()]
    one, other = map(load_file, last)
    assert all(other[name].equal(x) for name, x in one.items())
