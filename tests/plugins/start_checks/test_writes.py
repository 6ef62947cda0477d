"""Writes that happen late in a run are tried before it starts."""

import json
import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from plugins.start_checks.writes import check_writes, try_write
from recipes.grpo.config import GRPOConfig
from recipes.grpo.main import read_config
from tests.chat_models import chat_model
from tests.messages import says
from tests.model_folders import LARGE, folder_of
from training.options.model_options import ModelOptions
from training.run.checkpoint import CheckpointError, Checkpoints
from training.run.checkpoint_size import checkpoint_bytes

HUGE = LARGE | {"num_hidden_layers": 2000}
"""Its checkpoint needs more than 25 TB."""


def grpo(folder: Path, model: str, **checkpoint: Any) -> GRPOConfig:
    (folder / "run").mkdir(exist_ok=True)
    options = [f"checkpoint.{name}={value}" for name, value in checkpoint.items()]
    options += [f"model.path={model}", "data.path=task:sort", "reward.source=exact_match", "rollout.engine=hf"]
    return read_config([*options, "train.precision=fp32", f"run_dir={folder}/run", "backend=local"])


def test_a_checkpoint_is_as_large_as_weights_optimizer_and_export_together(tmp_path: Path) -> None:
    # 16 bytes per parameter: the master weight and two moments in the state, and the export.
    tiny = folder_of(tmp_path / "tiny", LARGE, model={"a": [10, 10], "lm_head.weight": [5]})
    assert checkpoint_bytes(grpo(tmp_path, tiny)) == 105 * 16
    assert checkpoint_bytes(grpo(tmp_path, str(tmp_path / "absent"))) == 0


@pytest.mark.parametrize("option", ["run_dir", "path", "export_path"])
def test_a_disk_without_space_for_a_checkpoint_is_refused(option: str, tmp_path: Path) -> None:
    places = {} if option == "run_dir" else {option: str(tmp_path / "elsewhere" / "c")}
    config = grpo(tmp_path, folder_of(tmp_path / "model", HUGE), **places)
    folder = places.get("path", f"{tmp_path}/run/checkpoints")
    with pytest.raises(ValueError, match=says("too little space", "free", folder, "GB", f"checkpoint.{'path'}")):
        check_writes(config, None, steps=1)


def test_checkpoints_that_are_kept_at_the_same_time_are_counted(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    # A third of the disk for each checkpoint: two fit, but three and their other files do not.
    model = folder_of(tmp_path / "model", LARGE, model={"a": [free // 16 // 3]})
    check_writes(grpo(tmp_path, model, every=1, keep=1), None, steps=2)
    check_writes(grpo(tmp_path, model, every=-1, keep=3), None, steps=100)
    check_writes(grpo(tmp_path, model, every=50, keep=3), None, steps=100)
    with pytest.raises(ValueError, match=says("checkpoints (3 x", "checkpoint.keep", "checkpoint.max_gb")):
        check_writes(grpo(tmp_path, model, every=1, keep=2), None, steps=100)
    check_writes(grpo(tmp_path, model, every=1, keep=2, max_gb=free / 2e9), None, steps=100)


def test_a_checkpoint_that_cannot_fit_is_not_started(tmp_path: Path) -> None:
    box = Checkpoints(tmp_path, least_bytes=10**18)
    calls: list[Path] = []
    with pytest.raises(CheckpointError, match=says("step 3", "No space", "MB free", "checkpoint.keep")):
        box.save(3, {}, calls.append)
    assert not calls and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("file", "text", "facts"),
    [
        ("generation_config.json", json.dumps({"max_new_tokens": 0}), ["generation_config.json", "max_new_tokens"]),
        ("generation_config.json", "[1]", ["generation_config.json"]),
    ],
)
def test_a_model_that_cannot_be_exported_ends_with_code_2(
    file: str, text: str, facts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = chat_model(tmp_path / "model")
    (model / file).write_text(text)
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}))
    main = import_module("recipes.sft.main").main
    options = [f"model.path={model}", f"data.path={tmp_path}/data.jsonl", f"run_dir={tmp_path}/run", "backend=local"]
    assert main(options) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert re.search(says(f"model.path={model}", "export", *facts), line)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_flags_that_transformers_does_not_save_are_left_out_and_named(tmp_path: Path) -> None:
    flags = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}
    model = chat_model(tmp_path / "model", **flags)
    (note,) = check_writes(grpo(tmp_path, str(model)), ModelOptions(path=str(model)), steps=1)
    assert re.search(says("temperature", "top_p", "generation_config.json"), note)
    assert check_writes(grpo(tmp_path, "warm_start:sort"), ModelOptions(path="warm_start:sort"), steps=1) == []


def test_a_folder_for_the_export_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = str(chat_model(tmp_path / "model"))
    with pytest.raises(ValueError, match=says("checkpoint.export_path", "file/export", "Not a directory")):
        check_writes(grpo(tmp_path, model, export_path=str(tmp_path / "file" / "export")), None, steps=1)


def test_the_trial_reports_a_name_that_is_too_long(tmp_path: Path) -> None:
    box = Checkpoints(tmp_path / "c")
    with pytest.raises(ValueError, match=says("trial export", box.folder, "File name too long")):
        try_write(box, lambda folder: (folder / ("x" * 300)).mkdir())
    assert not list(box.folder.iterdir())
