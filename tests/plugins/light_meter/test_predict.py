"""Prediction of a step from measured passes."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.registry import load
from plugins.light_meter.bounds import Limits
from plugins.light_meter.predict import CALL_S, phase_seconds
from plugins.light_meter.work import Lengths
from plugins.machine_speed.layers import EngineSpeed, Passes, Point
from plugins.machine_speed.speed import MachineSpeed, device_name
from recipes.grpo.main import main

LENGTHS = Lengths.assumed(prompts=8, samples=4, prompt=5, response=10, longest=16)
NAMES = ["generate", "logprobs", "train", "sync"]


def speed(layer_s: float, logit_s: float = 0.0, with_engines: bool = True) -> MachineSpeed:
    """A machine on which each layer of a pass takes `layer_s`, whatever its size, and nothing else takes time."""
    points = [Point(parameters=p, tokens=t, layer_s=layer_s, rest_s=1e-9) for p in (10, 10**9) for t in (1, 10**9)]
    each = Passes(points=points, logit_s=logit_s)
    passes: dict[str, Passes] = {"forward": each, "train": each, "decode": each}
    return MachineSpeed(
        device=device_name(0),
        source="measured",
        products={"1": {"float32": 1e15}},
        memory={"1": {"1000": 1e15}},
        host_copy=1e15,
        disk=1e15,
        network=1e15,
        engines={"1": EngineSpeed(passes=passes)} if with_engines else {},
    )


def predicted(config: Any, machine: MachineSpeed) -> dict[str, float]:
    return phase_seconds(Limits.of_run(config, machine, threads=1), LENGTHS, NAMES)


def test_generation_takes_a_pass_for_each_token_of_the_longest_response_and_one_for_the_prompts(config: Any) -> None:
    seconds = predicted(config, speed(0.01))
    layers = 2
    assert seconds["generate"] == pytest.approx(CALL_S + (16 + 1) * layers * 0.01, rel=1e-3)
    # Two optimizer steps, and one pass for the log-probs.
    assert seconds["train"] == pytest.approx(CALL_S + 2 * layers * 0.01, rel=1e-3)
    assert seconds["logprobs"] == pytest.approx(CALL_S + layers * 0.01, rel=1e-3)


def test_fewer_rows_in_an_engine_take_more_passes(config: Any) -> None:
    whole = predicted(config, speed(0.01))["generate"] - CALL_S
    config.rollout.max_num_seqs = 8
    assert predicted(config, speed(0.01))["generate"] - CALL_S == pytest.approx(4 * whole, rel=1e-3)


def test_logits_count_for_the_tokens_of_responses(config: Any) -> None:
    vocabulary = 20
    seconds = predicted(config, speed(1e-9, logit_s=1e-6))
    assert seconds["logprobs"] - CALL_S == pytest.approx(320 * vocabulary * 1e-6, rel=1e-2)


def test_machine_without_measured_engines_gives_the_bounds(config: Any) -> None:
    limits = Limits.of_run(config, speed(0.0, with_engines=False), threads=1)
    assert phase_seconds(limits, LENGTHS, NAMES) == limits.bounds(LENGTHS, dict.fromkeys(NAMES, 0.0))


def test_dry_run_shows_the_speed_of_a_measured_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path))
    command = ["--dry_run", "backend=local", f"run_dir={tmp_path / 'run'}", "max_steps=5"]
    assert main(command) == 0
    assert "speed" not in json.loads(capsys.readouterr().out)
    load("machine speed", "write")(speed(0.01))
    assert main(command) == 0
    printed = capsys.readouterr()
    fields = json.loads(printed.out)["speed"]
    assert fields["step_s"] == pytest.approx(sum(fields["phases"].values()))
    assert "speed     about" in printed.err
    assert "for 5 steps" in printed.err
