"""recipes/sft in complete runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from local_runs import run_here, run_locally
from recipe_runs import Run, RunFolder
from tiny_models import byte_tokenizer, shape, write_policy
from transformers import MixtralConfig, MixtralForCausalLM

from tests.messages import says


def write_rows(folder: Path) -> Path:
    rows = [{"prompt": f"{letter * 5}>", "response": letter * 5} for letter in "abcdefgh"] * 40
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "rows.jsonl"


OPTIONS = ["model.path=new:sort", "train.batch_size=32", "evaluation.held_out=8", "train.learning_rate=3e-3"]


def test_a_run_leaves_its_metrics_a_checkpoint_and_a_model(tmp_path: Path) -> None:
    options = [
        *OPTIONS,
        f"data.path={write_rows(tmp_path)}",
        "data.max_samples=104",
        "train.zero_stage=0",
        "evaluation.every=2",
    ]
    run = run_here("sft", tmp_path / "run", *options, f"checkpoint.export_path={tmp_path}/model")
    assert run.code == 0, run.err
    assert (run.summary["status"], run.summary["steps"], run.summary["error"]) == ("finished", 3, None)
    assert [line["step"] for line in run.metrics if "sft/loss" in line or "actor/loss" in line] == [1, 2, 3]
    assert [line["step"] for line in run.lines if "eval/loss" in line] == [0, 2, 3]
    assert run.summary["score"] is None
    for name in ("config.yaml", "environment.json", "plan.json", "events.jsonl", "checkpoints/latest"):
        assert (run.run_dir / name).is_file(), name
    saved = (tmp_path / "model/model.safetensors").read_bytes()
    assert saved == (run.run_dir / "checkpoints/step_3/hf/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    """Return short runs of untrained models on rows with other column names."""
    folder = tmp_path_factory.mktemp("runs")
    policy, experts = write_policy(folder / "policy"), write_experts(folder / "experts")
    talks = [
        {"talk": [turn("user", "a"), turn("assistant", "b"), turn("user", str(n)), turn("assistant", "d")]}
        for n in range(24)
    ]
    questions = [{"question": f"{n}?", "answer": "yes"} for n in range(24)]
    texts = [{"input": "never mind " * (n + 1)} for n in range(24)]
    paths = {"talks": talks, "asked": questions, "texts": texts}
    for name, rows in paths.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    template_options = [
        f"model.path={policy}",
        "train.batch_size=8",
        "train.learning_rate=1e-2",
        "train.lr_warmup_ratio=0",
        "seed=1",
    ]
    pair = [f"data.path={folder}/asked.jsonl", "data.prompt_key=question", "data.response_key=answer"]
    talk = [f"data.path={folder}/talks.jsonl", "data.prompt_key=talk"]
    options = {
        "pairs": [*template_options, *pair, "checkpoint.every=2"],
        "as there": [
            *("--pretrain", str(policy), "--dataset", f"{folder}/asked.jsonl", "--input_key", "question"),
            *("--output_key", "answer", "--input_template", "{}", "--train_batch_size", "8", "--learning_rate", "1e-2"),
            *("--lr_warmup_ratio", "0", "--seed", "1", "--micro_train_batch_size", "3", "--packing_samples"),
        ],
        "all turns": [*template_options, *talk],
        "last turn": [*template_options, *talk, "data.multiturn=false"],
        "texts": [*template_options, f"data.path={folder}/texts.jsonl", "data.plain_text=true", "data.max_tokens=32"],
        "mixed": [
            *template_options,
            f"data.path={folder}/asked.jsonl,{folder}/asked.jsonl",
            *pair[1:],
            "data.probs=0.5,0.5",
        ],
        "apart": [*template_options, *pair, f"evaluation.path={folder}/asked.jsonl", "evaluation.max_samples=5"],
        "adapters": [*template_options, *pair, "train.lora_rank=4", "checkpoint.every=2"],
        "adapters resumed": [
            *template_options,
            *pair,
            "train.lora_rank=4",
            f"resume={folder}/adapters/checkpoints/step_2",
        ],
        "experts": [*template_options, *pair, f"model.path={experts}"],
        "experts, balanced": [*template_options, *pair, f"model.path={experts}", "train.router_aux_loss_coef=10"],
        "experts, packed": [*template_options, *pair, f"model.path={experts}", *PACKED],
    }
    return {**run_locally("sft", folder, options)}


PACKED = ["train.router_aux_loss_coef=10", "train.packing=true", "train.gradient_checkpointing=true"]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write_experts(folder: Path) -> Path:
    """Write a mixture of four experts with random weights."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    settings: dict[str, Any] = shape(tokenizer) | {"num_local_experts": 4, "num_experts_per_tok": 2}
    MixtralForCausalLM(MixtralConfig(**settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def losses(run: RunFolder) -> list[float]:
    return [line["actor/loss"] for line in run.metrics if "actor/loss" in line]


def test_a_command_of_openrlhf_trains_equally_to_the_native_one(runs: dict[str, RunFolder]) -> None:
    # With packing and with three examples per pass: only rounding differs.
    assert losses(runs["as there"]) == pytest.approx(losses(runs["pairs"]), abs=1e-4)
    assert len(losses(runs["pairs"])) == 3


def test_training_on_the_last_turn_only_gives_another_loss(runs: dict[str, RunFolder]) -> None:
    # An untrained model gives all of the 260 tokens similar probabilities: 5.56 nats.
    assert [losses(runs[name])[0] for name in ("all turns", "last turn")] == pytest.approx([5.56, 5.56], abs=0.1)
    assert losses(runs["all turns"]) != losses(runs["last turn"])


def test_plain_texts_are_trained_on_and_truncated(runs: dict[str, RunFolder]) -> None:
    assert runs["texts"].summary["steps"] == 3
    assert losses(runs["texts"])[-1] < losses(runs["texts"])[0] - 0.3


def test_a_data_mixture_has_the_rows_of_all_its_parts(runs: dict[str, RunFolder]) -> None:
    assert runs["mixed"].summary["steps"] > 6  # 24 rows of each of two parts, in batches of 8. Some rows repeat.


def test_a_separate_evaluation_file_leaves_all_data_for_training(runs: dict[str, RunFolder]) -> None:
    evaluated = [line["step"] for line in runs["apart"].lines if "eval/loss" in line]
    assert (evaluated, runs["apart"].summary["steps"]) == ([0, 3], 3)


def test_adapters_are_merged_into_the_saved_model_and_resume_bit_equal(runs: dict[str, RunFolder]) -> None:
    run, resumed = runs["adapters"], runs["adapters resumed"]
    assert losses(run)[-1] < losses(run)[0]
    assert resumed.learnt() == run.learnt()[-1:]
    weights, again = run.weights(), resumed.weights()
    assert {name for name in weights if not weights[name].equal(again[name])} == set()
    assert not [name for name in weights if name.startswith("hf") and "lora" in name and "adapter" not in name]


def test_experts_are_balanced_by_the_router_loss(runs: dict[str, RunFolder]) -> None:
    plain, balanced, packed = (runs[name].metrics for name in ("experts", "experts, balanced", "experts, packed"))
    first = balanced[0]
    assert 2 < first["actor/router_aux_loss"] < 4  # two of four experts per token: uniform is 2
    assert first["actor/loss"] == pytest.approx(plain[0]["actor/loss"] + 10 * first["actor/router_aux_loss"], rel=1e-5)
    assert first["actor/nll"] == pytest.approx(plain[0]["actor/nll"], rel=1e-5)
    assert "actor/router_aux_loss" not in plain[0]
    # Padding and tokens without a successor are not counted, so packing counts one token per row differently.
    assert packed[0]["actor/router_aux_loss"] == pytest.approx(first["actor/router_aux_loss"], rel=0.1)


@pytest.mark.full
def test_two_ranks_train_on_a_jsonl_file_and_export_the_model(ray_address: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = [f"data.path={write_rows(tmp_path)}", f"checkpoint.export_path={tmp_path}/model"]
    options = [*OPTIONS, *arguments, "train.epochs=3", "train.zero_stage=2", "placement.ranks_per_node=2"]
    run = Run("sft", ray_address, tmp_path / "run", *options).wait()
    assert run.code == 0, run.err
    first, *_, last = [entry["eval/loss"] for entry in run.lines if "eval/loss" in entry]
    assert last < first / 3
    assert run.summary["steps"] == 30  # 312 demonstrations in batches of 32, three epochs
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(run.run_dir / "checkpoints" / "step_30" / "hf")
    prompt = tokenizer("ccccc>", return_tensors="pt")
    response = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(response, skip_special_tokens=True) == "ccccc"


def test_print_config_prints_the_configuration_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipes.sft.main import main

    assert main(["--print_config", "seed=5", f"run_dir={tmp_path}/run"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["seed"], printed["model"]["path"]) == (5, "new:sort")
    assert not (tmp_path / "run").exists()


def test_option_names_of_openrlhf_are_accepted() -> None:
    from recipes.sft.main import read_config

    old = """--pretrain m --dataset d --max_len 9 --train_batch_size 64 --learning_rate 1e-5 --packing_samples
        --use_wandb true"""
    new = """--model.model_name_or_path m --data.dataset d --data.max_len 9 --train.batch_size 64 --adam.lr 1e-5
        --ds.packing_samples --logger.wandb.key true --optim adam"""
    assert read_config(["run_dir=x", *old.split()]) == read_config(["run_dir=x", *new.split()])


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["data.path=nowhere.jsonl"], ["nowhere.jsonl"]),
        (["model.path=new:sport", "data.path=task:sort"], ["sport"]),
        (["learning_rte=1"], ["learning_rte", "learning_rate"]),
        (["model.path=nobody/has-this", "data.path=task:sort"], ["model.path=nobody/has-this"]),
        (["--dataset_probs", "0.5,0.5"], ["dataset_probs='0.5,0.5'", "1 parts"]),
        (["evaluation.path=task:sort"], ["evaluation.path=task:sort", "evaluation.held_out"]),
    ],
)
def test_bad_input_is_reported_in_one_line_with_exit_code_2(
    options: list[str], facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from recipes.sft.main import main

    assert main(options) == 2
    error = capsys.readouterr().err
    assert re.search(says(*facts), error)
    assert error.count("\n") == 1
