"""recipes/sft as its users meet it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_runs import run_here
from recipe_runs import Run

from tests.messages import says


def write_rows(folder: Path) -> Path:
    rows = [{"prompt": f"{letter * 5}>", "response": letter * 5} for letter in "abcdefgh"] * 40
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "rows.jsonl"


OPTIONS = ["pretrain=new:sort", "train_batch_size=32", "eval_samples=8", "learning_rate=3e-3"]


def test_a_run_leaves_its_metrics_a_checkpoint_and_a_model(tmp_path: Path) -> None:
    options = [*OPTIONS, f"dataset={write_rows(tmp_path)}", "max_samples=104", "zero_stage=0", "eval_steps=2"]
    run = run_here("sft", tmp_path / "run", *options, f"save_path={tmp_path}/model")
    assert run.code == 0, run.err
    assert (run.summary["status"], run.summary["steps"], run.summary["error"]) == ("finished", 3, None)
    assert [line["step"] for line in run.metrics if "sft/loss" in line or "actor/loss" in line] == [1, 2, 3]
    assert [line["step"] for line in run.metrics if "eval/loss" in line] == [0, 2, 3]
    assert run.summary["score"] is None
    for name in ("config.yaml", "environment.json", "plan.json", "events.jsonl", "checkpoints/latest"):
        assert (run.run_dir / name).is_file(), name
    saved = (tmp_path / "model/model.safetensors").read_bytes()
    assert saved == (run.run_dir / "checkpoints/step_3/hf/model.safetensors").read_bytes()


@pytest.mark.full
def test_two_ranks_learn_from_a_jsonl_of_prompts_and_responses_and_export_what_they_learnt(
    ray_address: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = [f"dataset={write_rows(tmp_path)}", f"save_path={tmp_path}/model"]
    options = [*OPTIONS, *given, "max_epochs=3", "zero_stage=2", "num_gpus_per_node=2"]
    run = Run("sft", ray_address, tmp_path / "run", *options).wait()
    assert run.code == 0, run.err
    first, *_, last = [entry["eval/loss"] for entry in run.metrics if "eval/loss" in entry]
    assert last < first / 3
    assert run.summary["steps"] == 30  # 312 demonstrations in batches of 32, three times
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(run.run_dir / "checkpoints" / "step_30" / "hf")
    prompt = tokenizer("ccccc>", return_tensors="pt")
    response = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(response, skip_special_tokens=True) == "ccccc"


def test_the_whole_configuration_is_printed_and_nothing_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipes.sft.main import main

    assert main(["--print_config", "seed=5", f"run_dir={tmp_path}/run"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["seed"], printed["pretrain"]) == (5, "new:sort")
    assert not (tmp_path / "run").exists()


def test_openrlhfs_names_are_taken() -> None:
    from recipes.sft.main import read_config

    old = """--pretrain m --dataset d --max_len 9 --train_batch_size 64 --learning_rate 1e-5 --packing_samples
        --use_wandb true"""
    new = """--model.model_name_or_path m --data.dataset d --data.max_len 9 --train.batch_size 64 --adam.lr 1e-5
        --ds.packing_samples --logger.wandb.key true --optim adam"""
    assert read_config(["run_dir=x", *old.split()]) == read_config(["run_dir=x", *new.split()])


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["dataset=nowhere.jsonl"], ["nowhere.jsonl"]),
        (["pretrain=new:sport", "dataset=task:sort"], ["sport"]),
        (["learning_rte=1"], ["learning_rte", "learning_rate"]),
        (["pretrain=nobody/has-this", "dataset=task:sort"], ["pretrain=nobody/has-this"]),
        (["eval_samples=0", "eval_steps=5"], ["eval_steps=5", "eval_samples"]),
        (["--dataset_probs", "0.5,0.5", "--use_ms"], ["dataset_probs:", "use_ms:"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    options: list[str], facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from recipes.sft.main import main

    assert main(options) == 2
    error = capsys.readouterr().err
    assert re.search(says(*facts), error)
    assert error.count("\n") == 1
