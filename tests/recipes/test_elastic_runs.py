"""A run whose number of engines changes trains exactly as a run with a fixed number."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyarrow.parquet import read_table
from recipe_runs import ROOT, Run

OPTIONS = """data.path=task:sort rollout.max_new_tokens=8 prompts_per_step=8 samples_per_prompt=4 max_steps=12
    train.mini_batch_size=16 evaluation.every=-1 checkpoint.every=-1 train.learning_rate=1e-4
    rollout.engine=hf rollout.verify_weight_sync=true placement.rollout_engines=2"""
OF_ENGINES = (
    *("rollout/logprob_gap", "rollout/mismatch", "rollout/chi_square", "rollout/effective"),
    *("actor/engine_gap", "actor/first_engine_gap"),
)
"""Metrics from the log-probabilities of the engines. Their last digit depends on the number of rows of a product, thus
on the number of engines. The policy is not trained on them."""
REWARD = """
import os, time

def reward(queries, prompts, labels):
    deadline = time.monotonic() + 200
    while os.path.exists({hold!r}) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [float(len(query) % 3) for query, label in zip(queries, labels)]
"""


def engines(run: Run, *words: str) -> str:
    """Return the output of scripts/engines.py for a run."""
    command = [sys.executable, str(ROOT / "scripts" / "engines.py"), str(run.run_dir), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_a_run_that_adds_removes_and_loses_engines_equals_an_undisturbed_run(
    ray_address: str, policy: Path, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    source = tmp_path / "reward.py"
    source.write_text(REWARD.format(hold=str(hold)))

    def start(name: str, *options: str) -> Run:
        chosen = [f"model.path={policy}", f"reward.source={source}:reward", *OPTIONS.split(), *options]
        return Run("grpo", ray_address, tmp_path / name, *chosen)

    @contextmanager
    def held() -> Iterator[None]:
        """Let the run wait in its reward during the block, so that it does not end first on a busy machine."""
        hold.touch()
        yield
        hold.unlink()

    def let_steps_pass(run: Run) -> None:
        steps = len(run.metrics)
        run.wait_until(lambda: len(run.metrics) >= steps + 2)

    elastic = start("elastic", "placement.elastic=true", "elastic.max_engines=4")
    elastic.wait_until(lambda: len(elastic.metrics) >= 1)
    with held():
        assert engines(elastic, "add", "2").startswith("4 of 4 engines: ROLLOUT-0 ROLLOUT-1 ROLLOUT-2 ROLLOUT-3")
    let_steps_pass(elastic)
    os.kill(elastic.pids()["rollout-0"], signal.SIGKILL)
    let_steps_pass(elastic)
    with held():
        assert engines(elastic, "remove").startswith("3 of 3 engines: ROLLOUT-0 ROLLOUT-1 ROLLOUT-2")
    elastic.wait()
    assert elastic.code == 0, elastic.err
    events = [json.loads(line) for line in (elastic.run_dir / "events.jsonl").read_text().splitlines()]
    calls = [event for event in events if event["event"] == "call" and event["role"] == "ROLLOUT"]
    assert {event["rank"] for event in calls if event["method"] == "generate"} == {0, 1, 2, 3}
    assert len(elastic.starts()["rollout-0"]) == 2
    assert elastic.left_behind() == []

    expected = start("fixed").wait()
    assert expected.code == 0, expected.err
    for step in range(1, 13):
        tokens = [
            read_table(run.run_dir / f"rollouts/step_{step:06d}.parquet")["tokens"] for run in (elastic, expected)
        ]
        assert tokens[0] == tokens[1]
    for line, expected_line in zip(elastic.learnt(), expected.learnt(), strict=True):
        assert line.keys() == expected_line.keys()
        for name, value in line.items():
            of_engine = name.startswith(OF_ENGINES)
            assert value == (pytest.approx(expected_line[name], abs=1e-5) if of_engine else expected_line[name]), name
    weights = elastic.weights()
    assert weights.keys() == expected.weights().keys()
    assert all(bool((weights[name] == tensor).all()) for name, tensor in expected.weights().items())
