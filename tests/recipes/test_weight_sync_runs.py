"""A run gives the same results with every weight transport, also if an engine dies."""

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from recipe_runs import Run

OPTIONS = """data.path=task:sort rollout.max_new_tokens=8 prompts_per_step=8 samples_per_prompt=4
    train.mini_batch_size=16 max_steps=6 evaluation.every=-1 checkpoint.every=-1 train.learning_rate=1e-3
    rollout.engine=hf rollout.verify_weight_sync=true placement.rollout_engines=2"""
LACKS = "will request it"
"""Text in the log of an engine that has missed a version."""
SENT_AGAIN = "is sent again, to the engine that lacks it"
WRITTEN = "is written to shared memory"
"""Texts in the log of rank 0 that tell by which way an engine gets the version it lacks."""
NEW_GROUP = "create a new process group"
"""Text in the log of the broadcasting rank after the first group has lost an engine."""


def calls(run: Run, *methods: str) -> Counter[str]:
    """Return the number of calls of some methods of each engine."""
    events = [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]
    rows = [row for row in events if row["event"] == "call" and row["role"] == "ROLLOUT"]
    return Counter(f"{row['rank']}.{row['method']}" for row in rows if row["method"] in methods)


@pytest.mark.nightly
def test_every_transport_of_weights_gives_the_same_training(ray_address: str, policy: Path, tmp_path: Path) -> None:
    def start(way: str, name: str) -> Run:
        chosen = [f"model.path={policy}", f"rollout.weight_sync={way}", *OPTIONS.split()]
        return Run("grpo", ray_address, tmp_path / name, *chosen)

    def log(run: Run, worker: str) -> str:
        return (run.run_dir / "logs" / f"{worker}.log").read_text()

    expected = start("shared_memory", "shared memory").wait()
    mapped = start("ipc", "mapped").wait()
    for run in (expected, mapped):
        assert run.code == 0, run.err
        assert run.learnt() == expected.learnt()
        assert LACKS not in log(run, "rollout-0") + log(run, "rollout-1")
        assert run.left_behind() == []
        # One call per sync and engine.
        assert calls(run, "receive_weights") == {"0.receive_weights": 6, "1.receive_weights": 6}

    for way in ("ipc", "broadcast"):
        struck = start(way, f"struck {way}")
        struck.wait_until(lambda run=struck: len(run.metrics) >= 2)
        os.kill(struck.pids()["rollout-1"], signal.SIGKILL)
        struck.wait()
        assert struck.code == 0, struck.err
        assert struck.learnt() == expected.learnt()
        assert len(struck.starts()["rollout-1"]) == 2
        # The replacement has missed the version that the last call sent, and requests it from the trainer.
        assert LACKS in log(struck, "rollout-1")
        assert log(struck, "actor-0").count(SENT_AGAIN) == 1
        assert WRITTEN not in log(struck, "actor-0")
        assert log(struck, "actor-0").count(NEW_GROUP) == (way == "broadcast")
        assert struck.left_behind() == []


@pytest.mark.nightly
@pytest.mark.vllm
def test_an_engine_is_checked_at_the_first_sync_and_again_after_its_replacement(
    ray_address: str, policy: Path, tmp_path: Path
) -> None:
    changed = {"rollout.engine=hf": "rollout.engine=vllm", "placement.rollout_engines=2": "rollout.cpu_cache_gb=0.1"}
    options = [changed.get(option, option) for option in OPTIONS.split()]
    run = Run("grpo", ray_address, tmp_path / "run", f"model.path={policy}", *options)
    run.wait_until(lambda: len(run.metrics) >= 2)
    os.kill(run.pids()["rollout-0"], signal.SIGKILL)
    run.wait()
    assert run.code == 0, run.err
    assert len(run.starts()["rollout-0"]) == 2
    # `check_engine_every` is 50: without the replacement there is one check in 6 steps.
    assert calls(run, "check_engine") == {"0.check_engine": 2}
