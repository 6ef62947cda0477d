"""Tests of the parts of check_gpu.py that need no process of a check: losses, warnings, logs and timers."""

from __future__ import annotations

import sys
import tarfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from components.rl.aggregation import Totals
from plugins.demo.tiny_model import character_tokenizer, tiny_model
from recipes.grpo.algorithm import policy_loss
from recipes.grpo.main import read_config

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import check_gpu_parts
import check_gpu_runs
import check_gpu_sync


def test_the_loss_of_the_speed_check_is_that_of_recipes_grpo() -> None:
    batch = check_gpu_parts.ragged([5, 9, 3], 20)
    batch = batch.with_tokens(rollout_logprob=batch["old_logprob"] - 0.1)
    totals = Totals(tokens=int(batch["action_mask"].sum()), sequences=3)
    config = read_config(["model.path=x", "data.path=task:sort"])
    results = []
    for loss in (check_gpu_parts.grpo_loss, partial(policy_loss, config=config)):
        model = tiny_model(character_tokenizer("abcdefghijklmnopq"), 0)
        output = loss(model, batch, totals)
        output.loss.backward()
        results.append((output, check_gpu_parts.gradients(model)))
    (ours, our_gradients), (theirs, their_gradients) = results
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(our_gradients, their_gradients)
    assert {name: float(value) for name, value in ours.metrics.items()} == {
        name: float(value) for name, value in theirs.metrics.items()
    }


def test_warnings_of_logs_are_counted_without_numbers_and_bounded(tmp_path: Path) -> None:
    log, other = tmp_path / "rollout-0.log", tmp_path / "metrics.jsonl"
    common = [f"12:00:0{i} WARNING version {i} as they were published\n" for i in range(3)]
    rare = [f"warning: {letter * 500}\n" for letter in "abcdefghijklmnopqrst"]
    log.write_text("".join([*common, "all is well\n", *rare]))
    other.write_text('{"WARNING": 1}\n')
    counts = check_gpu_runs.warnings_of([log, other])
    assert len(counts) == check_gpu_runs.MOST_WARNINGS
    assert next(iter(counts.items())) == ("N:N:N WARNING version N as they were published", 3)
    assert max(len(text) for text in counts) == check_gpu_runs.MOST_CHARACTERS


def test_only_the_ends_of_logs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_gpu_runs, "MOST_LOG_BYTES", 4)
    log = tmp_path / "trainer-0.log"
    log.write_text("123456789")
    check_gpu_runs.keep_logs(tmp_path / "logs" / "run.tar.gz", [log])
    with tarfile.open(tmp_path / "logs" / "run.tar.gz") as tar:
        [member] = tar.getmembers()
        kept = tar.extractfile(member)
        assert kept is not None
        assert (member.name, kept.read()) == ("trainer-0.log", b"6789")


def test_a_run_beyond_its_limit_is_interrupted_and_its_output_kept(tmp_path: Path) -> None:
    output = tmp_path / "output.log"
    program = (
        "import sys, time\nprint('begun', flush=True)\ntry: time.sleep(600)\nexcept KeyboardInterrupt: sys.exit(3)"
    )
    began = time.monotonic()
    assert check_gpu_runs.execute([sys.executable, "-c", program], output, 5.0) == (3, True)
    assert time.monotonic() - began < 300
    assert output.read_text() == "begun\n"
    assert check_gpu_runs.execute([sys.executable, "-c", "raise SystemExit(4)"], output, 300.0) == (4, False)


def test_timers_are_medians_of_early_and_late_steps_without_the_first() -> None:
    steps = [{"timing_s/sync": 99.0}, *({"timing_s/sync": 1.0} for _ in range(10))]
    assert check_gpu_sync.timer_text(steps) == "sync 1.000, at most 1.000"
    steps += [{"timing_s/sync": 5.0, "timing_s/wake": 2.0} for _ in range(3)]
    assert check_gpu_sync.timer_text(steps) == (
        "sync 1.000, later 5.000, at most 5.000; wake 0.000, later 2.000, at most 2.000"
    )
