"""Predicted and measured seconds of a step, for three recipes and three sizes of models.

Both are times of one thread of the processor, so that other programs on the machine have little influence.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from plugins.demo.tasks import TASKS
from plugins.demo.tiny_model import character_tokenizer

pytestmark = [pytest.mark.full, pytest.mark.nightly]

ROOT = Path(__file__).resolve().parents[3]
MOST_ERROR = 0.25
SIZES = {(64, 2): (64, 16), (192, 4): (32, 16), (384, 6): (8, 24)}
"""Hidden size and layers of the model -> prompts of a step and maximum number of new tokens."""
PROGRAM = """
import importlib, sys, time, types
import training.run.phase_clock as clock
clock.time = types.SimpleNamespace(monotonic=time.process_time, time=time.time)
sys.exit(importlib.import_module(f"recipes.{sys.argv[1]}.main").main(sys.argv[2:]))
"""
"""Program that runs a recipe in one process, with phases in seconds of the processor."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the measured speed of this machine."""
    folder = tmp_path_factory.mktemp("cache")
    program = [sys.executable, str(ROOT / "scripts" / "measure_machine.py"), "--threads", "1"]
    subprocess.run(program, env=environment(folder), check=True, capture_output=True)
    return folder


def environment(cache: Path) -> dict[str, str]:
    return os.environ | {"TROUPE_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def write_model(folder: Path, hidden: int, layers: int) -> Path:
    tokenizer = character_tokenizer(TASKS["sort"].alphabet)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("recipe", ["grpo", "openrlhf_ppo", "verl_ppo"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_predicted_step_is_within_a_quarter_of_the_measured_one(
    recipe: str, size: tuple[int, int], cache: Path, tmp_path: Path
) -> None:
    prompts, longest = SIZES[size]
    run_dir = tmp_path / "run"
    options = [
        "backend=local",
        f"model.path={write_model(tmp_path / 'model', *size)}",
        "data.path=task:sort",
        "data.max_samples=512",
        "data.max_prompt_tokens=16",
        f"prompts_per_step={prompts}",
        "samples_per_prompt=8",
        f"rollout.max_new_tokens={longest}",
        f"train.mini_batch_size={4 * prompts}",
        "max_steps=6",
        f"run_dir={run_dir}",
    ]
    program = [sys.executable, "-c", PROGRAM, recipe, *options]
    subprocess.run(program, env=environment(cache), check=True, capture_output=True)
    # The second command reads the mean response of the run.
    planned = subprocess.run([*program, "--dry_run"], env=environment(cache), check=True, capture_output=True)
    records = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    measured = statistics.median(record["timing_s/step"] for record in records if record["step"] > 3)
    assert json.loads(planned.stdout)["speed"]["step_s"] == pytest.approx(measured, rel=MOST_ERROR)
