"""Models that cannot be trained, and programs that nobody can keep in, are said before anything starts."""

import json
import re
from pathlib import Path

import pytest

from components.data.sandbox import PERMISSION
from components.data.tasks import get_task
from components.data.tiny_model import task_tokenizer, tiny_model
from recipes.grpo.main import COMMAND
from tests.messages import says
from training.config import CommandLine


def started(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a run with this model ends with, as bad input."""
    run = folder.parent / "run"
    capsys.readouterr()  # of saving the model
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


def test_a_tokenizer_of_more_tokens_than_the_model_knows_is_refused(
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
    assert COMMAND.plan(COMMAND.asked(line), line).job.global_env == environment
