"""recipes/reward_model in complete runs."""

import json
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from local_runs import run_here, run_locally
from recipe_runs import ROOT, Run, RunFolder
from safetensors.torch import load_file
from tiny_models import byte_tokenizer, write_policy
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from components.batch import Batch
from components.data.preferences import scored_tokens
from components.data.text import TextEncoder
from components.models.reward_model import RewardModel
from components.models.value_model import load_value_model
from recipes.reward_model.main import main
from tests.messages import says

MARKS = [chr(code) for code in range(ord("!"), ord("A"))]  # each prompt belongs to two pairs of one split
SHORT = [
    *("train.batch_size=16", "train.epochs=2", "evaluation.held_out=12", "seed=3"),
    *("train.learning_rate=1e-3", "train.lr_warmup_ratio=0", "train.zero_stage=0"),
]
GUIDE = """--save_steps -1 --logging_steps 1 --eval_steps -1 --train_batch_size 256 --micro_train_batch_size 4 --bf16
    --max_epochs 1 --max_len 8192 --zero_stage 3 --learning_rate 9e-6 --apply_chat_template --chosen_key chosen
    --rejected_key rejected --packing_samples --gradient_checkpointing --use_wandb true"""
"""Options of the published command, without model, data, folder and attention, which needs a GPU."""
SAME = {
    "padded": "train.packing=false train.max_tokens=100",
    "three pairs at a time": "train.micro_batch_size=3",
    "recomputed": "train.gradient_checkpointing=true",
    "deepspeed 1": "train.zero_stage=1",
    "deepspeed 2": "train.zero_stage=2",
    "deepspeed 3": "train.zero_stage=3",
    "fsdp 3": "train.engine=fsdp train.zero_stage=3",
}
"""Settings that do not change the result."""


ADAPTERS = ["train.lora_rank=4", "train.lora_alpha=8", "train.learning_rate=1e-2", "train.zero_stage=2"]


class Runs(NamedTuple):
    """The finished runs and their inputs."""

    folders: dict[str, RunFolder]
    rows: list[dict[str, Any]]
    policy: Path
    text: Path

    def exported(self, name: str) -> Path:
        """Return the trained model of a run."""
        run = self.folders[name]
        return run.run_dir / "checkpoints" / f"step_{run.summary['steps']}" / "hf"


def rows_of_pairs() -> list[dict[str, Any]]:
    rng = random.Random(0)
    letters = [mark * 3 for mark in MARKS for _ in range(2)]
    responses = [{"chosen": "y" * rng.randint(1, 9), "rejected": "n" * rng.randint(1, 9)} for _ in letters]
    return [{"prompt": prompt, "margin": 1.5} | pair for prompt, pair in zip(letters, responses, strict=True)]


def as_chat(row: dict[str, Any]) -> dict[str, Any]:
    """The same pair as two conversations."""
    user = {"role": "user", "content": row["prompt"]}
    return {key: [user, {"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")}


def as_written(row: dict[str, Any]) -> dict[str, Any]:
    """The same pair with the text that the template writes after a response."""
    return row | {key: row[key] + "\n" for key in ("chosen", "rejected")}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Small runs."""
    folder, rows = tmp_path_factory.mktemp("runs"), rows_of_pairs()
    policy = write_policy(folder / "policy")
    ends_in_padding = write_policy(folder / "ends_in_padding", byte_tokenizer(pad_token="<eos>"))
    text = write_rows(folder / "text.jsonl", rows)
    chat = write_rows(folder / "chat.jsonl", [as_chat(row) for row in rows])
    written = write_rows(folder / "written.jsonl", [as_written(row) for row in rows])
    plain = [f"model.path={policy}", f"data.path={text}", "data.prompt_key=prompt", *SHORT]
    chats = [f"model.path={policy}", *SHORT]
    options = {
        "plain": [*plain, "checkpoint.every=3"],
        "resumed": [*plain, f"resume={folder}/plain/checkpoints/step_3"],
        **{name: [*plain, *extra.split()] for name, extra in SAME.items()},
        "adapters": [*plain, *ADAPTERS, "checkpoint.every=3"],
        "adapters resumed": [*plain, *ADAPTERS, f"resume={folder}/adapters/checkpoints/step_3"],
        "finished twice": plain,
        "finished": [*plain, f"run_dir={folder}/finished twice"],
        "with margins": [*plain, "algorithm.margin_loss=true"],
        "padded with the end": [*plain, f"model.path={ends_in_padding}"],
        "messages": [*chats, f"data.path={chat}"],
        "prompts of users": [*chats, f"data.path={text}", "data.prompt_key=prompt", "data.apply_chat_template=true"],
        "by hand": [
            *chats,
            f"data.path={written}",
            "data.prompt_key=prompt",
            "data.input_template=<user>{}\n<assistant>",
        ],
        "all judged": [*plain, "evaluation.held_out=0", f"evaluation.path={text}"],
        "none judged": [*plain, "evaluation.held_out=0"],
        "guide": [
            *GUIDE.split(),
            "--pretrain",
            str(policy),
            "--dataset",
            str(chat),
            f"--save_path={folder}/rm",
            "evaluation.held_out=8",
        ],
        "new": ["model.path=new:text", f"data.path={chat}", *SHORT],
    }
    return Runs({**run_locally("reward_model", folder, options)}, rows, policy, text)


def seen_in_training(runs: Runs, name: str) -> set[str]:
    """Return the tokens whose embedding has changed, which are those that the run has trained on."""
    vocabulary = byte_tokenizer().get_vocab()
    before, after = (
        next(x for tensor, x in load_file(folder / "model.safetensors").items() if "embed_tokens" in tensor)
        for folder in (runs.policy, runs.exported(name))
    )
    moved_V = (before != after).any(1)
    return {mark for mark in MARKS if moved_V[vocabulary[mark]]}


def logged(run: RunFolder) -> torch.Tensor:
    """Return the metrics [steps, metrics] of training, including held-out pairs."""
    names = ("reward/loss", "reward/accuracy", "reward/margin", "reward/grad_norm", "eval/loss", "eval/reward_std")
    return torch.tensor([[float(line.get(name, 0)) for name in names] for line in run.lines])


@pytest.mark.parametrize("name", SAME)
def test_precision_packing_and_micro_batches_do_not_change_the_result(runs: Runs, name: str) -> None:
    expected = logged(runs.folders["plain"])
    assert expected.shape == (1 + 2 * 4, 6)  # before training, and after two epochs of 52 pairs in batches of 16
    torch.testing.assert_close(logged(runs.folders[name]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_training_on_two_ranks_matches_one_rank(runs: Runs, ray_address: str, tmp_path: Path) -> None:
    options = [f"model.path={runs.policy}", f"data.path={runs.text}", "data.prompt_key=prompt", *SHORT]
    run = Run(
        "reward_model", ray_address, tmp_path / "run", *options, "train.zero_stage=3", "placement.ranks_per_node=2"
    ).wait()
    assert run.code == 0, run.err
    torch.testing.assert_close(logged(run), logged(runs.folders["plain"]), rtol=1e-4, atol=1e-4)
    assert re.search(says("accuracy", "12 held-out pairs"), run.out)


def test_held_out_conversations_are_never_trained_on(runs: Runs) -> None:
    trained = seen_in_training(runs, "plain")
    heldout = runs.folders["plain"].summary["score"]["examples"]
    assert heldout == 12
    assert len(trained) == (64 - 12) // 2  # six of the 32 prompts with two pairs each are held out
    assert seen_in_training(runs, "none judged") == set(MARKS)


def test_an_evaluation_file_leaves_the_whole_data_set_to_training(runs: Runs) -> None:
    assert seen_in_training(runs, "all judged") == set(MARKS)
    assert runs.folders["all judged"].summary["score"]["examples"] == 64


@pytest.mark.parametrize("name", ["plain", "padded with the end", "new"])
def test_transformers_computes_the_same_scores_with_left_and_right_padding(runs: Runs, name: str) -> None:
    folder = runs.exported(name)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token != tokenizer.eos_token
    encoder = TextEncoder(tokenizer)
    texts = [row["prompt"] * n + row[key] for n, row in enumerate(runs.rows[:20]) for key in ("chosen", "rejected")]
    tokens = [scored_tokens(text, encoder) for text in texts]
    expected_B = RewardModel(folder).score(Batch.from_rows({"tokens": tokens}))
    assert expected_B.std() > 0.01
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    for side in ("left", "right"):
        inputs = tokenizer.pad({"input_ids": tokens}, padding_side=side, return_tensors="pt")
        assert (inputs["input_ids"][:, 0 if side == "left" else -1] == tokenizer.pad_token_id).any()
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits[:, 0], expected_B, rtol=1e-5, atol=1e-5)


def test_mean_and_deviation_of_the_last_evaluation_normalise_the_scores(runs: Runs) -> None:
    folder = runs.exported("all judged")  # when all pairs of the file are evaluated
    last = runs.folders["all judged"].metrics[-1]
    config = json.loads((folder / "config.json").read_text())
    assert (config["mean"], config["std"]) == (last["eval/reward_mean"], last["eval/reward_std"])
    encoder = TextEncoder(byte_tokenizer())
    texts = [row["prompt"] + row[key] for row in runs.rows for key in ("chosen", "rejected")]
    batch = Batch.from_rows({"tokens": [scored_tokens(text, encoder) for text in texts]})
    score_B, normal_B = (RewardModel(folder, normalize=normalize).score(batch) for normalize in (False, True))
    # Scores of the model during training.
    assert float(score_B.mean()) == pytest.approx(config["mean"], abs=1e-5)
    assert float(score_B.std()) == pytest.approx(config["std"], abs=1e-5)
    assert float(normal_B.mean()) == pytest.approx(0, abs=1e-4)
    assert float(normal_B.std()) == pytest.approx(1, abs=1e-4)


def test_a_resumed_run_ends_with_the_same_weights(runs: Runs) -> None:
    assert runs.folders["resumed"].learnt() == runs.folders["plain"].learnt()[-5:]
    ends = [load_file(runs.exported(name) / "model.safetensors") for name in ("plain", "resumed")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_adapters_and_the_head_are_trained_and_merged_into_the_saved_model(runs: Runs) -> None:
    losses = [line["eval/loss"] for line in runs.folders["adapters"].lines if "eval/loss" in line]
    assert losses[-1] < losses[0] - 0.1
    start, end = (load_file(folder / "model.safetensors") for folder in (runs.policy, runs.exported("adapters")))
    assert end.keys() == start.keys() | {"score.weight"}
    changed = {name for name in start if not start[name].equal(end[name])}
    assert changed == {name for name in start if name.endswith("proj.weight")}
    untrained = load_value_model(runs.policy, seed=3).score.weight
    assert not end["score.weight"].equal(untrained)
    model: Any = AutoModelForSequenceClassification.from_pretrained(runs.exported("adapters"), num_labels=1)
    batch = Batch.from_rows({"tokens": [[5, 6, 2], [7, 2]]})
    score_B = RewardModel(runs.exported("adapters")).score(batch)
    with torch.no_grad():
        theirs = [float(model(input_ids=torch.tensor([row])).logits) for row in batch.lists("tokens")]
    assert score_B.tolist() == pytest.approx(theirs, abs=1e-5)


def test_a_resumed_run_of_adapters_ends_with_the_same_weights(runs: Runs) -> None:
    assert runs.folders["adapters resumed"].learnt() == runs.folders["adapters"].learnt()[-5:]
    ends = [load_file(runs.exported(name) / "model.safetensors") for name in ("adapters", "adapters resumed")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_restarting_a_finished_run_prints_the_same_summary(runs: Runs) -> None:
    once, twice = runs.folders["plain"], runs.folders["finished twice"]
    assert twice.summary["resumed_from"] == twice.summary["steps"] == 8
    assert (twice.summary["status"], twice.summary["score"]) == ("finished", once.summary["score"])
    assert twice.learnt() == once.learnt()


def test_a_margin_increases_the_loss(runs: Runs) -> None:
    plain, margin = (runs.folders[name].lines[1] for name in ("plain", "with margins"))
    assert margin["reward/accuracy"] == plain["reward/accuracy"]
    # Initial scores are near 0, where -log sigmoid(0) = 0.693 and -log sigmoid(0 - 1.5) = 1.701.
    assert plain["reward/loss"] == pytest.approx(0.693, abs=0.1)
    assert margin["reward/loss"] == pytest.approx(1.701, abs=0.1)


@pytest.mark.parametrize("name", ["prompts of users", "by hand"])
def test_messages_and_equal_texts_train_identically(runs: Runs, name: str) -> None:
    assert runs.folders[name].learnt() == runs.folders["messages"].learnt()


def test_the_published_command_runs(runs: Runs) -> None:
    run = runs.folders["guide"]
    assert (run.summary["status"], run.summary["steps"]) == ("finished", 1)
    config = yaml.safe_load((run.run_dir / "config.yaml").read_text())
    train = config["train"]
    assert (train["precision"], train["zero_stage"], train["packing"]) == ("bf16", 3, True)
    saved: Any = AutoModelForSequenceClassification.from_pretrained(run.run_dir.parent / "rm", num_labels=1)
    assert saved.dtype == torch.bfloat16
    assert list((run.run_dir / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["data.path=nowhere.jsonl"], ["data.path=nowhere.jsonl"]),
        (["data.chosen_key=better"], ["row 0", "'better'"]),
        (["data.apply_chat_template=true", "data.ignored_columns=prompt"], ["apply_chat_template", "prompt_key"]),
        (["data.split=test"], ["test", "'train'"]),
        (["evaluation.path=task:sort"], ["evaluation.path=task:sort", "evaluation.held_out"]),
        (["data.path=task:guess"], ["task:guess", "task:sort", "task:word"]),
        (["model.path=nobody/has-this"], ["model.path=nobody/has-this"]),
        (["learning_rte=1"], ["learning_rte", "learning_rate"]),
        (["train.engine=fsdp", "train.zero_stage=1"], ["fsdp", "zero_stage=1", "2 or 3"]),
        (["--ds.lora.rank", "-1"], ["ds.lora.rank=-1"]),
        (["--use_ms"], ["use_ms", "ModelScope"]),
    ],
)
def test_bad_input_is_reported_in_one_line_with_exit_code_2(
    options: list[str],
    facts: list[object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    policy, text = write_policy(tmp_path / "policy"), write_rows(tmp_path / "text.jsonl", rows_of_pairs())
    capsys.readouterr()
    assert main([f"model.path={policy}", f"data.path={text}", f"run_dir={tmp_path}/run", *options]) == 2
    error = capsys.readouterr().err
    assert re.search(says(*facts), error)
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (
            ["data.max_tokens=3", "data.prompt_key=prompt", "evaluation.held_out=0"],
            ["data.max_tokens", 64, "too_long"],
        ),
    ],
)
def test_a_run_without_training_pairs_ends_with_one_line(
    options: list[str], facts: list[object], tmp_path: Path
) -> None:
    policy, text = write_policy(tmp_path / "policy"), write_rows(tmp_path / "text.jsonl", rows_of_pairs())
    run = run_here("reward_model", tmp_path / "run", f"model.path={policy}", f"data.path={text}", *options)
    assert run.code == 1
    assert re.search(says(*facts), run.err)
    assert run.err.count("\n") == 1
    assert run.summary["status"] == "failed"


def test_holding_out_all_pairs_is_rejected_before_the_start(tmp_path: Path) -> None:
    policy, text = write_policy(tmp_path / "policy"), write_rows(tmp_path / "text.jsonl", rows_of_pairs())
    options = ["evaluation.held_out=64", "data.prompt_key=prompt"]
    run = run_here("reward_model", tmp_path / "run", f"model.path={policy}", f"data.path={text}", *options)
    assert run.code == 2
    assert re.search(says("evaluation.held_out", 64, "data.path"), run.err)
    assert not (tmp_path / "run").exists()


def test_newer_names_and_values_without_effect_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    newer = """--model.model_name_or_path m --data.dataset d.jsonl --value_prefix_head v --ds.zero_stage 1
        --adam.lr 1e-4 --model.margin_loss_enable --model.loss_type sigmoid --model.aux_loss_coef 0 --ckpt.load_enable
        --zpg 1 --logger.wandb.project p --data.dataset_split test"""
    assert main([*newer.split(), "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    taken = {
        "model": {"path": "m", "value_head_prefix": "v"},
        "data": {"path": "d.jsonl", "split": "test"},
        "train": {"zero_stage": 1, "learning_rate": 1e-4},
        "algorithm": {"margin_loss": True},
        "log": {"wandb_project": "p"},
    }
    assert {group: {name: printed[group][name] for name in settings} for group, settings in taken.items()} == taken


@pytest.mark.parametrize("option", ["data.path", "evaluation.path"])
def test_a_missing_file_is_reported_before_a_model_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path / "cache"))
    assert main([f"{option}={tmp_path}/none.jsonl", f"run_dir={tmp_path}/run"]) == 2
    assert f"{option}={tmp_path}/none.jsonl" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_tilde_in_a_path_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    groups = ("model", "data", "evaluation")
    assert main([*(f"{group}.path=~/{group}" for group in groups), "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert {group: printed[group]["path"] for group in groups} == {group: f"{tmp_path}/{group}" for group in groups}


def test_the_text_preset_needs_only_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preset = ROOT / "recipes" / "reward_model" / "hh.yaml"
    assert main(["--config", str(preset), "data.path=pairs.jsonl.gz", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["path"] == "new:text"
