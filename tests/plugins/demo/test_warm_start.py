"""Warm starts: trained once, cached by content, and complete or absent."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.data.prompts import PromptSource, load_rows
from components.models.sources import resolve_model
from plugins.demo import warm_start
from plugins.demo.tasks import SortTask, Task, WordTask
from plugins.demo.warm_start import (
    WarmStartSettings,
    cache_root,
    ensure_warm_start,
    main,
    make_warm_start,
    source_files,
)
from tests.messages import says

PROJECT = Path(__file__).parents[3]
SHORT = WarmStartSettings(steps=3, batch_size=8)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache folder."""
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return the folder of a short warm start, requested by a process that looks like a rank of a job, and its
    progress.
    """
    cache = tmp_path_factory.mktemp("cache")
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("RANK", "1")
        patch.setenv("TROUPE_CACHE", str(cache))
        return ensure_warm_start(SHORT, lines.append), lines


def test_a_warm_start_is_loaded_with_its_tokenizer_and_task(made: tuple[Path, list[str]]) -> None:
    folder, lines = made
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("dbcaf>abcdf<eos>")["input_ids"]) == "dbcaf>abcdf<eos>"
    assert tokenizer.chat_template
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len(lines) == 1
    assert re.search(says("sort", "step 3/3", "loss="), lines[0])
    note = json.loads((folder / "warm_start.json").read_text())
    # After three small steps the loss is near that of uniform guessing among 20 tokens: ln 20 = 3.0.
    assert 2.0 < note["loss"] < 3.2


def test_an_existing_warm_start_is_used_without_training(
    made: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = made
    monkeypatch.setenv("TROUPE_CACHE", str(folder.parents[1]))
    lines: list[str] = []
    assert ensure_warm_start(SHORT, lines.append) == folder
    assert make_warm_start(SHORT, lines.append) == folder
    assert lines == []


@pytest.mark.full
def test_the_command_line_ends_with_the_path_and_makes_the_same_weights(
    made: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, _ = made
    # A folder that a killed process may have left.
    leftover = tmp_path / "warm_start" / f"{folder.name}.partial"
    leftover.mkdir(parents=True)
    (leftover / "junk").write_text("")
    command = [sys.executable, "-m", "plugins.demo.warm_start", "--task", "sort", "--steps", "3", "--batch_size", "8"]
    env = {**os.environ, "TROUPE_CACHE": str(tmp_path)}
    result = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=540)
    assert result.returncode == 0, result.stderr
    *progress, last = result.stdout.splitlines()
    assert len(progress) == 1
    assert re.search(says("sort", "step 3/3"), progress[0])
    assert Path(last) == tmp_path / "warm_start" / folder.name
    assert sorted(path.name for path in Path(last).iterdir()) == sorted(path.name for path in folder.iterdir())
    weights = "model.safetensors"
    assert (Path(last) / weights).read_bytes() == (folder / weights).read_bytes()
    assert not leftover.exists()


def test_defaults_come_from_the_task_and_set_values_override_them() -> None:
    sort = WarmStartSettings()
    word = WarmStartSettings(task="word", steps=7)
    assert (sort.steps, sort.batch_size) == (150, 128)
    assert (word.steps, word.batch_size) == (7, 32)


def test_the_word_task_has_a_trained_tokenizer(cache: Path) -> None:
    folder = make_warm_start(WarmStartSettings(task="word", steps=3, batch_size=4), lambda _line: None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    text = "Ann has 7 figs, buys 5 and eats 3. How many are left?\n7+5=12 12-3=9 #### 9<eos>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < model.config.vocab_size == len(tokenizer) == 369
    note = json.loads((folder / "warm_start.json").read_text())
    # After three small steps the loss is near that of uniform guessing among 369 tokens: ln 369 = 5.9.
    assert note["steps"] == 3
    assert 4.0 < note["loss"] < 6.2


def test_a_second_process_waits_and_uses_the_model_of_the_first(cache: Path) -> None:
    folder = warm_start._folder(SHORT)
    folder.mkdir(parents=True)
    lines: list[str] = []
    waiting = threading.Event()
    result: list[Path] = []

    def progress(line: str) -> None:
        lines.append(line)
        waiting.set()

    second = threading.Thread(target=lambda: result.append(make_warm_start(SHORT, progress)))
    with warm_start._locked(folder.with_name(f"{folder.name}.lock"), progress):
        second.start()
        assert waiting.wait(timeout=300)
        (folder / "warm_start.json").write_text("{}")
    second.join(timeout=300)
    assert result == [folder]
    assert len(lines) == 1


def test_an_error_of_the_training_process_is_raised_with_its_output(cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(RuntimeError, match=says("exit code 1", "NotADirectoryError")):
        ensure_warm_start(SHORT)


def test_invalid_settings_exit_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--task", "sorting"]) == 2
    assert re.search(says("'sorting'", "guess", "sort", "word"), capsys.readouterr().err)
    with pytest.raises(ValueError, match=says("steps=0", 1)):
        WarmStartSettings(steps=0)


def test_the_hash_covers_every_file_that_shapes_the_model() -> None:
    names = {str(path.relative_to(PROJECT)) for path in source_files()}
    assert {
        "components/batch/__init__.py",
        "components/data/supervised.py",
        "plugins/demo/tasks.py",
        "plugins/demo/tiny_model.py",
        "components/models/causal.py",
        "plugins/deepspeed/engine.py",
        "components/rl/supervised.py",
        "plugins/demo/warm_start.py",
    } <= names
    others = {"training/tracking/tracker.py", "training/run/checkpoint.py", "components/rewards/scorers.py"}
    assert not others & names


def test_the_cache_folder_is_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_root() == Path("/a")
    monkeypatch.delenv("TROUPE_CACHE")
    assert cache_root() == Path("/b/troupe")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_root() == Path("/c/.cache/troupe")


def test_a_model_name_other_than_a_warm_start_stays_unchanged() -> None:
    assert resolve_model("some/model") == "some/model"
    with pytest.raises(ValueError, match="'sorting'"):
        resolve_model("warm_start:sorting")


def responses(folder: Path, task: Task, temperature: float, count: int) -> list[tuple[str, str]]:
    """Return one response to each of the first held-out prompts, with its label."""
    from components.generate.config import SamplingConfig
    from components.generate.hf_engine import HFRolloutEngine

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = load_rows(f"task:{task.name}", split="heldout", max_rows=count)
    prompts = PromptSource(rows, tokenizer, 0, shuffle=False).take(count)
    prompts = prompts.with_sequences(sample_id=torch.zeros(count, dtype=torch.int64))
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=task.max_response_tokens)
    batch = HFRolloutEngine(folder).generate(prompts, sampling)
    ids = [batch.row(i, "tokens")[batch.row(i, "action_mask")].tolist() for i in range(count)]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [(text, row["label"]) for text, row in zip(texts, rows, strict=True)]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_sort_warm_start_mostly_sorts_in_descending_order(cache: Path, seed: int) -> None:
    task = SortTask()
    folder = ensure_warm_start(WarmStartSettings(seed=seed))

    def scores(temperature: float) -> tuple[float, float]:
        pairs = responses(folder, task, temperature, 2048)
        right = sum(task.score(text, label) for text, label in pairs)
        reversed_ = sum(task.score(text[::-1], label) for text, label in pairs)
        return right / 2048, reversed_ / 2048

    sampled, sampled_reversed = scores(1.0)
    greedy, greedy_reversed = scores(0.0)
    print(f"seed {seed}: sampled {sampled:.3f} ({sampled_reversed:.3f} reversed), greedy {greedy:.3f}")
    assert 0.13 < sampled < 0.25
    assert greedy < 0.15
    assert sampled_reversed > 0.5
    assert greedy_reversed > 0.85


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1])
def test_the_word_warm_start_calculates_correctly_and_seldom_uses_the_required_form(cache: Path, seed: int) -> None:
    task = WordTask()
    folder = ensure_warm_start(WarmStartSettings(task="word", seed=seed))
    pairs = responses(folder, task, 1.0, 512)
    styles = [task.style(*pair) for pair in pairs]
    marks, reasons, in_form, right_in_form = (sum(s[name] for s in styles) / 512 for name in styles[0])
    sampled = sum(task.score(*pair) for pair in pairs) / 512
    print(f"seed {seed}: sampled {sampled:.3f}, marks {marks:.2f}, reasons {reasons:.2f}, in form {in_form:.2f}")
    assert 0.2 < sampled < 0.45
    # About the shares in the demonstrations: 0.6, 0.5 and their product.
    assert 0.5 < marks < 0.7
    assert 0.35 < reasons < 0.65
    assert right_in_form > 0.8 * in_form > 0.15
