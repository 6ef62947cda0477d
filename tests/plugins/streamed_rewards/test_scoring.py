"""Rewards of responses that are scored while an engine generates others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from components.batch import Batch
from components.data.samples import add_rewards
from components.generate.config import EVALUATION_STEP, SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from components.rewards.base import RewardSettings
from components.rewards.opening import open_reward
from components.rewards.workers import WorkerReward
from plugins.demo.tiny_model import character_tokenizer
from plugins.streamed_rewards.opening import is_of_one
from plugins.streamed_rewards.scoring import StreamedRewards
from plugins.vllm.config import VLLMRolloutConfig
from tests.components.conftest import write_model
from tests.components.helpers.vllm_models import write_vllm_model

REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep({seconds})
    if {fails} and "c" in solution_str:
        raise ValueError("no c")
    numbers = {{"distinct": len(set(solution_str))}} if len(solution_str) > 3 else {{}}
    return {{"score": len(solution_str) / 7 + (ground_truth == "1"), **numbers}}

def of_all(queries, prompts, labels, **kwargs):
    return [1.0 for _ in queries]
"""
SAMPLING = SamplingConfig(max_new_tokens=12, step=3)
COUNT = 24


class Reporting(HFRolloutEngine):
    """An hf engine that reports responses by their length once all are complete."""

    on_finished: Any = None

    def generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """See `RolloutEngine.generate`."""
        rollouts = super().generate(prompts, sampling)
        if self.on_finished is not None:
            for index in rollouts.lengths.argsort().tolist():
                self.on_finished(index, rollouts.row(index, "tokens")[int(rollouts["prompt_length"][index]) :].tolist())
                time.sleep(0.002)
        return rollouts


def prompts() -> Batch:
    texts = [f"prompt {i}" for i in range(COUNT)]
    return Batch.from_rows(
        {"tokens": [[2 + i % 9, 4] for i in range(COUNT)]},
        {"prompt_id": list(range(COUNT)), "sample_id": [0] * COUNT},
        {"prompt": texts, "label": [str(i % 2) for i in range(COUNT)]},
    )


def reward_file(folder: Path, seconds: float = 0.0, fails: bool = False) -> str:
    path = folder / "reward.py"
    path.write_text(REWARD.format(seconds=seconds, fails=fails))
    return f"{path}:compute_score"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Reporting:
    return Reporting(write_model(tmp_path_factory.mktemp("model"), seed=5, tied=True))


def assert_equal(actual: Batch, expected: Batch) -> None:
    assert list(actual.per_sequence) == list(expected.per_sequence)
    for name, column in expected.per_sequence.items():
        assert torch.equal(actual[name].nan_to_num(-1.0), column.nan_to_num(-1.0)), name


def test_rewards_are_equal_to_the_bit_to_those_after_the_generation(engine: Reporting, tmp_path: Path) -> None:
    spec = f"0.7*{reward_file(tmp_path)} + 0.3*exact_match"
    tokenizer = character_tokenizer("abcdefghijklmnopqrst")
    said: list[str] = []
    for source_spec in (reward_file(tmp_path), spec):
        with open_reward(source_spec, RewardSettings(workers=2)) as source:
            streamed = StreamedRewards(engine, source, tokenizer).generate(prompts(), SAMPLING)
            rollouts = engine.generate(prompts(), SAMPLING)
            assert_equal(streamed, add_rewards(rollouts, source, tokenizer, said.append, SAMPLING.step - 1))
            # An evaluation may have another reward, and is scored by the trainer.
            held_out = SamplingConfig(max_new_tokens=2, step=EVALUATION_STEP)
            assert "reward" not in StreamedRewards(engine, source, tokenizer).generate(prompts(), held_out)
    assert said == []
    assert bool(streamed["reward"].unique().numel() > 3)


def test_a_batch_with_a_failed_response_is_left_to_the_trainer(engine: Reporting, tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abcdefghijklmnopqrst")
    with open_reward(reward_file(tmp_path, fails=True)) as source:
        rollouts = StreamedRewards(engine, source, tokenizer).generate(prompts(), SAMPLING)
    assert "reward" not in rollouts
    assert len(rollouts) == COUNT
    assert engine.on_finished is None


def test_only_rewards_of_one_response_are_computed_ahead(tmp_path: Path) -> None:
    file = reward_file(tmp_path)
    assert is_of_one("exact_match")
    assert is_of_one(file)
    assert not is_of_one(file.replace("compute_score", "of_all"))
    assert not is_of_one("http://127.0.0.1:5000/score")


@pytest.mark.full
@pytest.mark.vllm
def test_vllm_generates_while_the_first_responses_are_scored(tmp_path: Path) -> None:
    from plugins.vllm.engine import VLLMRolloutEngine

    # The batch has a long tail: every sixth response has ten times as many tokens as the others.
    limits = torch.tensor([60 if i % 6 == 0 else 6 for i in range(COUNT)])
    batch = prompts().with_sequences(max_new_tokens=limits)
    tokenizer = character_tokenizer("abcdefghijklmnopqrst")
    sampling = SamplingConfig(max_new_tokens=60, step=1)
    engine = VLLMRolloutEngine(
        write_vllm_model(tmp_path / "model", seed=11, tied=True), VLLMRolloutConfig(cpu_cache_gb=0.25)
    )
    finished: list[float] = []
    with WorkerReward(reward_file(tmp_path, seconds=0.002), RewardSettings()) as source:
        rollouts = StreamedRewards(engine, source, tokenizer).generate(batch, sampling)
        engine.on_finished = lambda index, tokens: finished.append(time.monotonic())
        again = engine.generate(batch, sampling)
        ended = time.monotonic()
        engine.on_finished = None
        assert_equal(rollouts, add_rewards(again, source, tokenizer, print, 0))
    engine.close()
    assert torch.equal(rollouts["tokens"], again["tokens"])
    assert len(finished) == COUNT
    # Most responses are reported long before the last one is complete.
    assert sorted(finished)[COUNT // 2] - finished[0] < 0.5 * (ended - finished[0])
