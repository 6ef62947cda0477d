"""Options left on `auto`, as commands resolve them on GPUs and on CPUs."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from plugins.choices.candidates import Domains, levels, row_domain, token_domain
from recipes.grpo.main import read_config
from tests.model_folders import folder_of

SMALL: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
LENGTHS = ["data.max_prompt_tokens=100", "rollout.max_new_tokens=200", "rollout.engine=vllm"]


def planned(
    recipe: str, folder: Path, capsys: pytest.CaptureFixture[str], *options: str, data: str = "task:sort"
) -> tuple[dict[str, Any], str]:
    model = folder / "model"
    if not model.is_dir():
        folder_of(model, SMALL)
    arguments = [f"model.path={model}", f"data.path={data}", "dry_run=true", *options]
    code = import_module(f"recipes.{recipe}.main").main(arguments)
    output = capsys.readouterr()
    assert code == 0, output.err
    return json.loads(output.out), output.err


def names(plan: dict[str, Any]) -> list[str]:
    return [text.partition("=")[0] for text in plan["chosen"]]


def test_user_options_are_kept_and_other_options_are_chosen_to_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["train.gradient_checkpointing=true", "train.max_tokens=5000", "rollout.max_num_seqs=96"]
    options += ["train.zero_stage=3", "placement.engines_sleep=true"]
    plan, _ = planned("grpo", tmp_path, capsys, *LENGTHS, *options, "assume_devices=1x1x80GB")
    assert names(plan) == ["rollout.gpu_memory"]
    config = plan["config"]
    train = config["train"]
    assert (train["gradient_checkpointing"], train["max_tokens"], train["zero_stage"]) == (True, 5000, 3)
    assert (config["rollout"]["max_num_seqs"], config["placement"]["engines_sleep"]) == (96, True)
    # 96 of 512 sequences are generated at a time, so the cache is sized for these.
    assert "96 sequences of 300 tokens" in plan["chosen"][0]
    assert config["rollout"]["gpu_memory"] < 0.1
    plan, _ = planned("grpo", tmp_path, capsys, *LENGTHS, "rollout.gpu_memory=0.08", "assume_devices=1x1x80GB")
    assert plan["config"]["rollout"]["gpu_memory"] == 0.08
    # A share of 6.4 GB cannot hold 512 sequences next to the weights, so the number of rows is reduced.
    assert plan["config"]["rollout"]["max_num_seqs"] == 256


def test_engines_with_separate_gpus_use_nearly_all_of_their_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, _ = planned("grpo", tmp_path, capsys, *LENGTHS, "placement.colocate=false", "assume_devices=2x1x80GB")
    assert names(plan) == [
        "train.gradient_checkpointing",
        "train.zero_stage",
        "train.max_tokens",
        "rollout.max_num_seqs",
    ]
    assert plan["config"]["rollout"]["gpu_memory"] is None
    assert plan["config"]["placement"]["engines_sleep"] is False


def test_unknown_gpu_memory_selects_the_values_with_the_least_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, shown = planned("grpo", tmp_path, capsys, *LENGTHS, "assume_devices=1x1")
    config = plan["config"]
    assert (config["train"]["gradient_checkpointing"], config["train"]["zero_stage"]) == (True, 3)
    assert (config["placement"]["engines_sleep"], config["rollout"]["max_num_seqs"]) == (True, 512)
    assert len(plan["chosen"]) == 1
    assert "not known" in plan["chosen"][0]
    assert "chosen" in shown


def test_supervised_runs_choose_their_training_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, _ = planned("sft", tmp_path, capsys, "train.engine=fsdp", "assume_devices=1x1x80GB")
    assert names(plan) == ["train.gradient_checkpointing", "train.max_tokens"]
    assert plan["config"]["train"]["gradient_checkpointing"] is False
    plan, _ = planned("sft", tmp_path, capsys, "train.engine=fsdp", "assume_devices=1x1x24GB")
    assert plan["config"]["train"]["gradient_checkpointing"] is True


def test_on_cpus_nothing_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, shown = planned("grpo", tmp_path, capsys, "assume_devices=0")
    config = plan["config"]
    train = config["train"]
    assert plan["chosen"] == []
    assert "chosen" not in shown
    assert (train["gradient_checkpointing"], train["max_tokens"], train["zero_stage"]) == (False, 16384, 0)
    assert (config["rollout"]["max_num_seqs"], config["placement"]["engines_sleep"]) == (512, False)
    resolved = read_config([f"model.path={tmp_path}/model", "data.path=task:sort"])
    assert (resolved.train_engine(1).max_tokens, resolved.rollout_engine().max_num_seqs) == (16384, 512)


def test_successive_levels_reduce_tokens_and_rows_alternately() -> None:
    assert levels([8, 4], [64, 32, 16]) == [(8, 64), (4, 64), (4, 32), (4, 16)]
    assert levels([8], [64]) == [(8, 64)]


def test_the_token_limit_admits_the_longest_sequence() -> None:
    assert token_domain(300) == [32768, 16384, 8192, 4096]
    assert token_domain(9000) == [32768, 16384, 9000]
    assert token_domain(40000) == [40000]


def test_generation_rows_are_limited_by_the_step_and_the_model_size() -> None:
    assert row_domain(10**9, 3000)[:3] == [2048, 1024, 512]
    assert row_domain(7 * 10**9, 3000)[0] == 1024
    assert row_domain(30 * 10**9, 3000)[0] == 512
    assert row_domain(10**9, 64)[0] == 256  # evaluations may sample more
    assert row_domain(10**9, 600)[0] == 1024


def test_choices_prefer_awake_engines_then_stored_activations_then_gathered_parameters() -> None:
    domains = Domains(
        sleeps=[False, True],
        recomputes=[False, True],
        stages=[2, 3],
        tokens=[8192, 4096],
        stored_tokens=8192,
        rows=[256, 128, 64],
    )
    chains = list(domains.chains())
    order = [(chain[0].sleeps, chain[0].recomputes, chain[0].stage, chain[0].rows) for chain in chains]
    first_half = [(False, recomputes, stage, 256) for recomputes in (False, True) for stage in (2, 3)]
    second_half = [(True, *rest) for _, *rest in first_half]
    assert order == [*first_half, *second_half, (False, True, 3, 64), (True, True, 3, 64)]
    assert {candidate.tokens for candidate in chains[0]} == {8192}
    assert {candidate.tokens for candidate in chains[2]} == {8192, 4096}
