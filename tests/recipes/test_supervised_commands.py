"""OpenRLHF's commands train_sft, train_rm, train_dpo and serve_rm, of releases 0.8 to 0.11, are accepted unchanged."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any, get_origin

import pytest
from local_runs import run_here
from tiny_models import write_policy

from recipes.dpo.config import DPOConfig
from recipes.reward_model.config import RewardModelConfig
from recipes.reward_model.serve import ServeConfig
from recipes.sft.config import SFTConfig
from training.options.config import Vocabulary, load_config
from training.options.schema import without_none
from training.options.table_adapter import KINDS

UPSTREAM = Path(__file__).parent / "upstream"
COMMANDS = [json.loads(line) for line in (UPSTREAM / "openrlhf_supervised.jsonl").read_text().splitlines()]
FLAGS: dict[str, dict[str, str]] = json.loads((UPSTREAM / "openrlhf_supervised_flags.json").read_text())
"""Program -> kind of value -> flags, of all releases from 0.8.11 to 0.11.0."""
RECIPES = {"train_sft": "sft", "train_rm": "reward_model", "train_dpo": "dpo"}
SCHEMAS: dict[str, Any] = {
    "train_sft": SFTConfig,
    "train_rm": RewardModelConfig,
    "train_dpo": DPOConfig,
    "serve_rm": ServeConfig,
}
MODELS = ("pretrain", "model_name_or_path", "reward_pretrain", "ref_pretrain")
"""Suffixes of the flags that name a model."""


def named(command: dict[str, Any]) -> str:
    return f"{command['source']} {command['script']}"


def locally(argv: list[str], model: Path, data: Path) -> list[str]:
    """Return the command with a local model and local data."""
    arguments = list(argv)
    for index, word in enumerate(argv[:-1]):
        last = word.removeprefix("--").rpartition(".")[2]
        if word.startswith("--") and last in MODELS:
            arguments[index + 1] = str(model)
        if word.startswith("--") and last == "dataset":
            parts = argv[index + 1].count(",") + 1
            arguments[index + 1] = ",".join([str(data)] * parts)
    return arguments


def write_rows(path: Path, count: int) -> Path:
    """Write rows that are demonstrations and pairs, with the columns of all commands."""
    rows = []
    for number in range(count):
        question = {"role": "user", "content": f"{number}?"}
        good, bad = ({"role": "assistant", "content": text} for text in ("yes", "no"))
        columns = {"question": f"{number}?", "response": "yes", "input": f"{number}?", "output": "yes"}
        rows.append(columns | {"chosen": [question, good], "rejected": [question, bad]})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("model"))


@pytest.mark.full
@pytest.mark.parametrize("command", [c for c in COMMANDS if c["program"] != "serve_rm"], ids=named)
def test_openrlhf_commands_are_accepted_in_full_on_their_machines(
    command: dict[str, Any], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = locally(command["argv"], model, write_rows(tmp_path / "rows.jsonl", 4))
    main = import_module(f"recipes.{RECIPES[command['program']]}.main").main
    assert main([*argv, "--dry_run", "--assume_devices", "8x2"]) == 0, capsys.readouterr().err
    plan = json.loads(capsys.readouterr().out)
    assert max(role["nproc_per_node"] for role in plan["roles"].values()) == 8


@pytest.mark.parametrize("command", [c for c in COMMANDS if c["program"] == "serve_rm"], ids=named)
def test_openrlhf_commands_of_the_reward_server_are_accepted_in_full(
    command: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    config = load_config(ServeConfig, locally(command["argv"], model, tmp_path))
    assert (config.model.path, config.port, config.precision) == (str(model), 5000, "bf16")
    assert (config.max_text_tokens, config.batch_size, config.normalize) == (8192, 16, True)


def words_of(kind: Any) -> str:
    """Return the number of command-line arguments that a value of this type takes."""
    kind = without_none(kind)
    return {bool: "none or one", tuple: "two", list: "any"}.get(get_origin(kind) or kind, "one")


@pytest.mark.parametrize("program", FLAGS)
def test_every_flag_of_the_program_is_known_and_takes_the_same_number_of_arguments(program: str) -> None:
    schema = SCHEMAS[program]
    upstream = [(name, words_of(KINDS[kind])) for kind, names in FLAGS[program].items() for name in names.split()]
    vocabulary = Vocabulary.from_schema(schema).with_adapters()
    kinds = {name: vocabulary.kind_of(name) for name, _ in upstream}
    assert [name for name, kind in kinds.items() if kind is None] == []
    assert [(name, words_of(kinds[name])) for name, _ in upstream] == upstream


@pytest.mark.full
@pytest.mark.parametrize("script", ["train_sft.sh", "train_rm.sh", "train_dpo_llama.sh"])
def test_an_openrlhf_command_trains_two_steps(
    script: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = next(c for c in COMMANDS if (c["source"], c["script"]) == ("v0.11.0", script))
    # its checkpoints are in ./checkpoint Only its batch size of 256 is changed, which would take long.
    monkeypatch.chdir(tmp_path)
    # Of its batches of 256 the size alone is another, which would only take its time.
    smaller = ["train.batch_size=16", "evaluation.held_out=8"]
    argv = locally(command["argv"], model, write_rows(tmp_path / "rows.jsonl", 2 * 16 + 8))
    run = run_here(RECIPES[command["program"]], tmp_path / "run", *argv, *smaller)
    assert run.code == 0, run.err
    assert (run.summary["status"], run.summary["steps"]) == ("finished", 2)
    folder = Path(command["argv"][command["argv"].index("--ckpt.output_dir") + 1])
    assert (tmp_path / folder / "model.safetensors").is_file()
