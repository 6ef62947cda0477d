"""Models that cannot be trained, and programs that cannot be isolated, are refused before anything starts."""

import json
import re
from pathlib import Path

import pytest

from plugins.demo.tasks import get_task
from plugins.demo.tiny_model import task_tokenizer, tiny_model
from plugins.sandbox.sandbox import PERMISSION
from recipes.grpo.main import COMMAND
from tests.messages import says
from training.options.config import CommandLine


def started(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line with which a run with this model ends, as for other invalid input."""
    run = folder.parent / "run"
    capsys.readouterr()  # output of saving the model
    assert COMMAND.main([f"model.path={folder}", "data.path=task:sort", "backend=local", f"run_dir={run}"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert not run.exists()
    return line


def test_a_broken_config_is_named_with_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": ')
    assert re.search(says(f"model.path={folder}", "config.json"), started(folder, capsys))


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    tokenizer = task_tokenizer(get_task("sort"))
    tiny_model(tokenizer, seed=1).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    known = json.loads((folder / "config.json").read_text())["vocab_size"]
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] |= {f"more{number}": 400 + number for number in range(7)}
    file.write_text(json.dumps(content))
    assert re.search(says(f"model.path={folder}", known, "model.tokenizer_path"), started(folder, capsys))


@pytest.mark.parametrize(("word", "environment"), [("isolated", {}), ("unsafe", {PERMISSION: "unsafe"})])
def test_sandbox_unsafe_reaches_every_process_of_the_run(word: str, environment: dict[str, str]) -> None:
    line = CommandLine(COMMAND.schema, [f"sandbox={word}", "data.path=task:sort", "model.path=warm_start:sort"])
    assert COMMAND.plan(COMMAND.requested_config(line), line).job.global_env == environment


def test_lengths_that_do_not_fit_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    tokenizer = task_tokenizer(get_task("sort"))
    tiny_model(tokenizer, seed=1, max_positions=64).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    arguments = [f"model.path={folder}", "data.path=task:sort", "data.max_samples=64", f"run_dir={tmp_path}/run"]
    # No prompt is short enough for 64 new tokens. One of 6 tokens is for 58.
    for options in (["rollout.max_new_tokens=64", "dry_run=true"], ["rollout.max_new_tokens=59"]):
        assert COMMAND.main([*arguments, *options]) == 2
        assert re.search(says(f"model.path={folder}", "64 positions", options[0]), capsys.readouterr().err)
    assert COMMAND.main([*arguments, "rollout.max_new_tokens=58", "dry_run=true"]) == 0
    # A plan for another machine may use a model with other lengths.
    assert COMMAND.main([*arguments, "rollout.max_new_tokens=64", "dry_run=true", "assume_devices=8x2"]) == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model", ["MODEL", "warm_start:sort"])
def test_prompts_that_are_all_too_long_are_refused_before_anything_starts(
    model: str, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"model.path={model.replace('MODEL', str(policy))}", "data.path=task:sort", "data.max_samples=64"]
    assert COMMAND.main([*arguments, "data.max_prompt_tokens=5", f"run_dir={tmp_path}/run"]) == 2
    assert re.search(says("64 prompts", "max_prompt_tokens=5", "6 tokens"), capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_missing_path_is_reported_as_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMAND.main([f"model.path={tmp_path}/my-modle", "data.path=task:sort", f"run_dir={tmp_path}/run"]) == 2
    assert re.search(says(f"model.path={tmp_path}/my-modle", "does not exist"), capsys.readouterr().err)
