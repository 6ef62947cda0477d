"""Tests of scripts/race.py and of the page generated from its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from components.batch import Batch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import race  # noqa: E402
import race_cases  # noqa: E402
import race_page  # noqa: E402
import race_sides  # noqa: E402
import watch_process  # noqa: E402


def step(time: float, generation: float, training: float) -> dict[str, float]:
    """Return the measurements of a step that ended at `time`, with 40 tokens of which 16 are new."""
    return {
        "time": time,
        "cpu": 2 * time,
        "host_bytes": 1e9 * time,
        "generation_s": generation,
        "training_s": training,
        "sync_s": 0.5,
        "places": 30,
        "pairs": 200,
        "tokens": 40,
        "token_pairs": 300,
        "new_tokens": 16,
    }


def test_medians_leave_out_two_steps_and_phases_with_other_add_up_to_the_step() -> None:
    steps = [step(0, 9, 9), step(100, 9, 9), step(108, 2, 4), step(118, 4, 5), step(130, 8, 2)]
    result = race_sides.medians(steps, [3 * 10**9, 2 * 10**9])
    assert result["step_s"] == 10
    assert (result["generation_s"], result["training_s"], result["sync_s"], result["reward_s"]) == (4, 4, 0.5, 0)
    assert result["other_s"] == 1.5  # 1.5, 0.5, 1.5
    assert result["generated_tokens_per_s"] == 16 / 4
    assert result["trained_tokens_per_s"] == 40 / 4
    assert result["cpu_s"] == 20
    assert (result["host_gb"], result["gpu_gb"]) == (130, 3)


def test_medians_of_too_few_steps_are_an_error_with_the_number() -> None:
    with pytest.raises(ValueError, match=r"2 steps.*3 or more"):
        race_sides.medians([step(0, 1, 1), step(1, 1, 1)])


def test_computed_places_of_troupe_count_a_shared_prompt_once(tmp_path: Path) -> None:
    # Two responses of 3 tokens to a prompt of 5 tokens. The responses have no common beginning.
    tokens = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 9, 7, 8])
    mask = torch.tensor([False] * 5 + [True] * 3).repeat(2)
    (tmp_path / "rollouts").mkdir()
    Batch(torch.tensor([8, 8]), {"tokens": tokens, "action_mask": mask}).save(
        tmp_path / "rollouts" / "step_000003.parquet"
    )
    row = {"step": 3, "time": 1.0, "cpu": 2.0, "host_bytes": 3.0, "timing_s/train": 0.5, "timing_s/generate": 0.25}
    for packing, places, pairs in (("null", 11, 64 + 64 - 25), ("false", 16, 128)):
        (tmp_path / "config.yaml").write_text(f"train: {{packing: {packing}, max_tokens: 64}}")
        measured = race_sides.troupe_step(row, tmp_path)
        assert (measured["places"], measured["pairs"]) == (places, pairs)
        assert (measured["tokens"], measured["token_pairs"], measured["new_tokens"]) == (16, 128, 6)
        assert (measured["training_s"], measured["generation_s"], measured["sync_s"]) == (0.5, 0.25, 0.0)


def test_utilisation_is_one_formula_of_places_and_of_separate_sequences(tmp_path: Path) -> None:
    model = race_cases.model_path(race_cases.CASES["tiny"], tmp_path)
    run = {"training_s": 2.0, "places": 10, "pairs": 60, "tokens": 20, "token_pairs": 140}
    result = race.with_utilisation(run, model, "cpu")
    loaded = race.meta_model(model)
    # Embeddings are tied, so every parameter counts 6 operations per place. Attention: 6 x layers x width x pairs.
    per_place = 6 * sum(parameter.numel() for parameter in loaded.parameters())
    attention = 6 * loaded.config.num_hidden_layers * loaded.config.hidden_size
    assert result["tflops"] == pytest.approx((10 * per_place + 60 * attention) / 2e12)
    assert result["effective_tflops"] == pytest.approx((20 * per_place + 140 * attention) / 2e12)
    assert "mfu" not in result  # the peak FLOPS of a CPU are unknown


def test_a_model_with_fixed_length_never_samples_its_end_token_and_keeps_differences_of_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(race_cases.model_path(race_cases.CASES["tiny"], tmp_path))
    end = model.generation_config.eos_token_id
    with torch.no_grad():
        logits_LV = model(torch.tensor([[3, 4, 5, 6, 7, 8]])).logits[0]
    probability_LV = logits_LV.softmax(-1)
    assert float(probability_LV[:, end].max()) < 1e-20
    others_LV = probability_LV[:, [token for token in range(probability_LV.shape[1]) if token != end]]
    assert float(others_LV.std()) > 1e-4


def records() -> list[dict[str, Any]]:
    return json.loads(race_page.RECORDS.read_text(encoding="utf-8"))


def test_the_page_is_written_from_the_stored_races() -> None:
    assert race_page.PAGE.read_text(encoding="utf-8") == race_page.page(records())


def test_the_page_says_that_no_gpu_race_exists_until_one_is_stored() -> None:
    [on_cpu, *_] = records()
    assert "No race on a GPU has been run" in race_page.page([on_cpu])
    on_gpu = {**on_cpu, "device": "NVIDIA H100", "threads": 0, "sides": {**on_cpu["sides"]}}
    on_gpu["sides"]["trl"] = {**on_cpu["sides"]["trl"], "mfu": 0.25, "gpu_gb": 40.0}
    text = race_page.page([on_cpu, on_gpu])
    assert "No race on a GPU" not in text
    assert "| MFU of computed places |  | 25.0% |" in text
    assert "| peak GPU memory, GB |  | 40.0 |" in text


def test_a_stored_race_replaces_the_one_of_the_same_case_engine_device_and_threads(tmp_path: Path) -> None:
    path = tmp_path / "race.json"
    first = {"case": "tiny", "engine": "transformers", "device": "CPU", "threads": 1, "pairs": 1}
    for record in (first, {**first, "threads": 2}, {**first, "pairs": 3}):
        race.store(path, record)
    stored = json.loads(path.read_text())
    assert [(each["threads"], each["pairs"]) for each in stored] == [(2, 1), (1, 3)]


def test_a_watched_process_yields_its_rows_with_cpu_seconds_and_host_memory(tmp_path: Path) -> None:
    program = f"import time; open({str(tmp_path / 'rows')!r}, 'w').write('{{\"step\": 1}}\\n'); time.sleep(0.3)"
    [row] = watch_process.watched([sys.executable, "-c", program], tmp_path / "rows", tmp_path / "log")
    assert row["step"] == 1
    assert row["cpu"] >= 0
    assert row["host_bytes"] > 0


def test_vllm_on_a_cpu_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        race.parsed(["tiny", "--device", "cpu", "--engine", "vllm"])
    assert ended.value.code == 2
    assert "--engine vllm" in capsys.readouterr().err


@pytest.mark.nightly  # installs TRL, and starts two processes that each import torch and transformers
def test_a_tiny_race_measures_all_phases_of_both_sides_on_the_same_tokens(tmp_path: Path) -> None:
    out = tmp_path / "race.json"
    command = [sys.executable, str(ROOT / "scripts" / "race.py"), "tiny", "--pairs", "1", "--threads", "1"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, "--out", str(out)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [record] = json.loads(out.read_text())
    troupe, trl = record["sides"]["troupe"], record["sides"]["trl"]
    for side in (troupe, trl):
        # 4 prompts x 4 responses of 8 tokens, after 16 tokens without a template.
        assert (side["new_tokens"], side["tokens"], side["token_pairs"]) == (128, 384, 16 * 24**2)
        phases = ("generation_s", "training_s", "sync_s", "reward_s", "other_s")
        assert sum(side[name] for name in phases) == pytest.approx(side["step_s"], rel=0.5)
        assert min(side["generation_s"], side["training_s"], side["host_gb"], side["tflops"]) > 0
    assert trl["places"] == 384
    assert troupe["places"] < 200  # each prompt is counted once
    assert f"| step, s | {troupe['step_s']:.3f} | {trl['step_s']:.3f} |" in done.stdout
