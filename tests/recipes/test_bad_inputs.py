"""Every recipe reports an invalid input in one line with exit code 2 and starts nothing."""

import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from plugins.demo.tasks import get_task
from plugins.demo.tiny_model import task_tokenizer, tiny_model
from tests.recipe_copies import RECIPES

MODEL = {"openrlhf_ppo": "pretrain", "verl_ppo": "actor_rollout_ref.model.path"}
DATA = {"openrlhf_ppo": "prompt_data", "verl_ppo": "data.train_files"}
RATE = {"openrlhf_ppo": "actor_learning_rate", "verl_ppo": "actor_rollout_ref.actor.optim.lr"}
WORDS = [
    "seed=???",
    "seed=@x",
    "seed={",
    "seed=*a",
    "seed=${",
    "seed=${x}",
    "seed=99999999999999999999",
    "--",
    "--=1",
    "-",
]
FILES = {
    "deep.yaml": "a: " + "[" * 500,
    "nul.yaml": "seed: \0",
    "tag.yaml": 'seed: !!python/object/apply:os.system ["exit"]',
    "two.yaml": "seed: 1\n---\nseed: 2",
    "twice.yaml": "seed: 1\nseed: 2",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model of the sort task."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = task_tokenizer(get_task("sort"))
    tiny_model(tokenizer, seed=3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def broken(model: Path, folder: Path, file: str, content: str) -> Path:
    shutil.copytree(model, folder)
    (folder / file).write_text(content)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_invalid_input_is_reported_in_one_line_before_the_start(
    recipe: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_model, of_data = MODEL.get(recipe, "model.path"), DATA.get(recipe, "data.path")
    config = json.loads((model / "config.json").read_text())
    less = json.dumps(config | {"vocab_size": config["vocab_size"] - 5})
    code = {"AutoConfig": "own.Config"}
    models = {
        broken(model, tmp_path / "code", "config.json", json.dumps({"model_type": "own", "auto_map": code})): "code",
        broken(model, tmp_path / "cut", "config.json", '{"a": '): "config.json",
        broken(model, tmp_path / "deep", "config.json", '{"a":' * 50_000): "config.json",
        broken(model, tmp_path / "list", "config.json", "[1]"): "config.json",
        broken(model, tmp_path / "words", "tokenizer.json", '{"a": '): "words",
        broken(model, tmp_path / "less", "config.json", less): "less",
    }
    (tmp_path / "code" / "own.py").write_text("raise SystemExit")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    half, deep = tmp_path / "half.jsonl", tmp_path / "deep.jsonl"
    half.write_text('{"prompt": "\\ud800", "chosen": "a", "rejected": "b", "response": "c"}\n')
    deep.write_text('{"a":' * 100_000)
    wrong = [(word, word) for word in [*WORDS, f"{RATE.get(recipe, 'train.learning_rate')}=nan"]]
    wrong += [(f"config={tmp_path / name}", name) for name in FILES]
    wrong += [(f"{of_data}={path}", path.name) for path in (half, deep, tmp_path / "none.jsonl")]
    wrong += [(f"{of_model}={path}", fact) for path, fact in models.items()]
    main = import_module(f"recipes.{recipe}.main").main
    for word, fact in wrong:
        run = tmp_path / "run"
        usual = [f"run_dir={run}", f"{of_model}={model}", f"{of_data}=task:sort"]
        if recipe == "multi_turn":
            usual.append("agent.func_path=env:guess")
        if recipe == "distill":
            usual.append(f"teacher.path={model}")
        code = main([*(option for option in usual if not word.startswith(option.partition("=")[0])), word])
        (line,) = capsys.readouterr().err.splitlines()
        assert code == 2, word
        assert fact in line
        assert not (run / "metrics.jsonl").exists(), word
