"""recipes/sft as its users meet it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipe_runs import Run


def test_it_learns_from_a_jsonl_of_prompts_and_responses_and_exports_what_it_learnt(
    ray_address: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [{"prompt": f"{letter * 5}>", "response": letter * 5} for letter in "abcdefgh"] * 40
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = f"""pretrain=new:sort dataset={tmp_path}/rows.jsonl train_batch_size=32 max_epochs=3 eval_samples=8
        learning_rate=3e-3 zero_stage=2 num_gpus_per_node=2 save_path={tmp_path}/model""".split()
    run = Run("sft", ray_address, tmp_path / "run", *options).wait()
    assert run.code == 0, run.err
    first, *_, last = [entry["eval/loss"] for entry in run.metrics if "eval/loss" in entry]
    assert last < first / 3
    assert run.summary["steps"] == 30  # 312 demonstrations in batches of 32, three times
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(run.run_dir / "checkpoints" / "step_30" / "hf")
    prompt = tokenizer("ccccc>", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "ccccc"


def test_the_whole_configuration_is_printed_and_nothing_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipes.sft.main import main

    assert main(["--print_config", "seed=5", f"run_dir={tmp_path}/run"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["seed"], printed["pretrain"]) == (5, "new:sort")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["dataset=nowhere.jsonl"], "nowhere.jsonl"),
        (["pretrain=new:sport", "dataset=task:sort"], "sport"),
        (["learning_rte=1"], "did you mean 'learning_rate'"),
        (
            ["pretrain=nobody/has-this", "dataset=task:sort"],
            "pretrain=nobody/has-this: it is no folder here",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipes.sft.main import main

    assert main(options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
