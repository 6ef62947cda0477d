"""recipes/dpo in complete runs: the loss, learning, invariances, and rejected options."""

import json
import math
import random
import re
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from local_runs import run_locally
from recipe_runs import Run, RunFolder
from tiny_models import byte_tokenizer, write_policy
from torch import Tensor
from transformers import AutoModelForCausalLM

from components.batch import Batch
from components.data.preferences import PairFormat, encode_pairs, read_pairs
from components.data.text import TextEncoder, load_tokenizer
from components.generate.config import SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from components.models.loading import load_policy
from components.models.sources import resolve_model
from components.rl.aggregation import Totals
from plugins.demo.tasks import get_task
from recipes.dpo.algorithm import loss, preference_loss, response_logprobs
from recipes.dpo.config import DPOConfig, DPOOptions
from recipes.dpo.data import in_calls
from recipes.dpo.main import main, read_config
from tests.messages import says
from training.options.judged_options import JudgedDataOptions
from training.options.model_options import ModelOptions

ROWS = [
    {"prompt": "one plus one is", "chosen": " two", "rejected": " eleven, they say"},
    {"prompt": "", "chosen": "a longer answer to nothing at all", "rejected": "no"},
    {"prompt": "name a fruit:", "chosen": " fig", "rejected": ""},
]
"""The second pair has no prompt, so no token precedes its responses. The last response consists of its end token."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy, and a reference of the same family. Their tokenizer has no padding token."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    paths = write_policy(folder / "policy", tokenizer), write_policy(folder / "reference", tokenizer)
    model: Any = AutoModelForCausalLM.from_pretrained(paths[1])
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(paths[1])
    return paths


@cache
def loaded(folder: Path) -> Any:
    """Load a model with transformers."""
    return AutoModelForCausalLM.from_pretrained(folder)


def transformers_logprobs(folder: Path, prompt: str, response: str) -> list[float]:
    """Return the log-probability of each token of a response, from transformers' logits of that sequence alone."""
    tokenizer, model = load_tokenizer(folder, pad_with_end=True), loaded(folder)
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, response))
    ids = [*before, *after, tokenizer.eos_token_id]
    with torch.no_grad():
        logprob_TV = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    # The first token of a sequence has no log-probability.
    return [0.0 if t == 0 else float(logprob_TV[t - 1, ids[t]]) for t in range(len(before), len(ids))]


def pairs_of(folder: Path, rows: list[dict[str, str]]) -> Batch:
    tokenizer = load_tokenizer(folder, pad_with_end=True)
    return encode_pairs(read_pairs(rows, PairFormat(prompt_key="prompt"), tokenizer), tokenizer, with_mask=True).batch


def gaps(policy: Path, reference: Path) -> list[float]:
    """Return, for each pair of ROWS, the log-ratio of the chosen response minus that of the rejected one."""
    gaps_P = []
    for row in ROWS:
        logprob_sums = {k: sum(transformers_logprobs(policy, row["prompt"], row[k])) for k in ("chosen", "rejected")}
        base = {k: sum(transformers_logprobs(reference, row["prompt"], row[k])) for k in ("chosen", "rejected")}
        gaps_P.append((logprob_sums["chosen"] - base["chosen"]) - (logprob_sums["rejected"] - base["rejected"]))
    return gaps_P


@pytest.mark.parametrize(
    ("options", "of_gap"),
    [
        ({"beta": 0.7}, lambda z: -math.log(1 / (1 + math.exp(-0.7 * z)))),
        (
            {"beta": 0.7, "label_smoothing": 0.2},
            lambda z: 0.8 * math.log(1 + math.exp(-0.7 * z)) + 0.2 * math.log(1 + math.exp(0.7 * z)),
        ),
        ({"beta": 0.7, "ipo": True}, lambda z: (z - 1 / 1.4) ** 2),
    ],
    ids=["dpo", "cdpo", "ipo"],
)
@pytest.mark.parametrize("nll_loss_coef", [0.0, 0.5])
def test_the_loss_equals_the_formulas_of_the_papers_on_transformers_logits(
    options: dict[str, Any], of_gap: Callable[[float], float], nll_loss_coef: float, models: tuple[Path, Path]
) -> None:
    policy, reference = models
    config = made(nll_loss_coef=nll_loss_coef, **options)
    batch = pairs_of(policy, ROWS)
    of_reference = [
        sum(transformers_logprobs(reference, row["prompt"], row[k])) for row in ROWS for k in ("chosen", "rejected")
    ]
    batch = batch.with_sequences(reference_logprob=torch.tensor(of_reference))
    output = loss(load_policy(policy), batch, Totals(tokens=1, sequences=6), config)
    nll = [-sum(x) / len(x) for x in (transformers_logprobs(policy, row["prompt"], row["chosen"]) for row in ROWS)]
    expected = sum(map(of_gap, gaps(policy, reference))) / 3 + nll_loss_coef * sum(nll) / 3
    assert output.loss.item() == pytest.approx(expected, abs=2e-5)
    output.loss.backward()
    assert ("nll" in output.metrics) == (nll_loss_coef > 0)


def test_the_common_prefix_of_both_responses_adds_nothing_to_the_loss(models: tuple[Path, Path]) -> None:
    config = made()
    batch = pairs_of(models[0], ROWS).with_sequences(reference_logprob=torch.zeros(6))
    own_N = torch.where(batch["loss_mask"], -1.0, torch.nan)  # nats per token; those of prompt tokens are arbitrary
    loss = preference_loss(_sums(own_N, batch), batch, 3, config)
    # -1 for each token and the end token: " two" 5, " eleven, they say" 18, then 34 and 3, 5 and 1.
    gap = [0.1 * (18 - 5), 0.1 * (3 - 34), 0.1 * (1 - 5)]
    assert loss.loss.item() == pytest.approx(sum(math.log(1 + math.exp(-z)) for z in gap) / 3, abs=1e-6)
    assert loss.metrics["accuracy"].item() == pytest.approx(1 / 3)


def made(**algorithm: Any) -> DPOConfig:
    """Return a configuration with these algorithm options."""
    settings = DPOOptions(**algorithm)
    return DPOConfig(model=ModelOptions(path="x"), data=JudgedDataOptions(path="x"), algorithm=settings)


def _sums(x_N: Tensor, batch: Batch) -> Tensor:
    return response_logprobs(x_N, batch)


# --- runs

SHORT = """data.path=task:sort data.max_samples=200 evaluation.held_out=40 data.max_tokens=16 train.batch_size=32
    train.learning_rate=1e-3 train.lr_warmup_ratio=0.1 train.zero_stage=2 algorithm.nll_loss_coef=0.1 seed=1"""
"""Five optimizer steps."""
VARIANTS = {
    "plain": ["checkpoint.every=2"],
    "padded": ["train.packing=false"],
    "fine": ["train.micro_batch_size=3"],
    "fsdp": ["train.engine=fsdp"],
    "resumed": [],
    "adapters": ["train.lora_rank=4", "train.lora_alpha=8", "train.learning_rate=1e-2"],
}
TIES = {
    "level": "",
    "level, bf16": "bf16=true",
    "level, padded": "train.packing=false train.engine=fsdp",
    "level, adapters": "train.lora_rank=4",
}


@pytest.fixture(scope="module")
def runs(policy: Path, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    """Return short runs in one process, by name."""
    folder = tmp_path_factory.mktemp("runs")
    options = {name: [f"model.path={policy}", *SHORT.split(), *extra] for name, extra in VARIANTS.items()}
    options["resumed"].append(f"resume={folder}/plain/checkpoints/step_2")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    messages_options = [
        f"data.path={folder}/rows.jsonl",
        "data.prompt_key=prompt",
        f"evaluation.path={folder}/rows.jsonl",
        "algorithm.beta=0.7",
    ]
    rng = random.Random(0)
    lengths = [[rng.randint(0, 150) for _ in range(3)] for _ in range(300)]
    rows = [{"prompt": "p" * p, "chosen": "c" * (c + 1), "rejected": "r" * (r + 1)} for p, c, r in lengths]
    (folder / "lengths.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ties = [
        f"model.path={models[0]}",
        f"data.path={folder}/lengths.jsonl",
        "data.prompt_key=prompt",
        "evaluation.held_out=150",
    ]
    ties += ["train.max_tokens=2000", "train.batch_size=256"]
    options |= {name: [*ties, *extra.split()] for name, extra in TIES.items()}
    options["two models"] = [f"model.path={models[0]}", f"reference.path={models[1]}", *messages_options]
    return {**run_locally("dpo", folder, options)}


def difference(one: RunFolder, other: RunFolder) -> float:
    """Return the maximum difference between their trained weights."""
    weights = [{name: x for name, x in run.weights().items() if name.startswith("hf")} for run in (one, other)]
    assert weights[0].keys() == weights[1].keys() != set()
    return max(float((x - weights[1][name]).abs().max()) for name, x in weights[0].items())


def test_a_resumed_run_is_bit_equal(runs: dict[str, RunFolder]) -> None:
    assert difference(runs["plain"], runs["resumed"]) == 0
    assert [line["step"] for line in runs["resumed"].metrics] == [3, 4, 5]
    untimed = [line for line in runs["plain"].learnt() if line["step"] > 2]
    assert untimed == runs["resumed"].learnt()
    # Metrics of the initial model are still known at the end.
    assert runs["plain"].summary["score"] == runs["resumed"].summary["score"]
    assert runs["plain"].summary["score"]["start"] == 0.5  # the policy equals the reference: all pairs are ties


@pytest.mark.parametrize("name", TIES)
def test_a_policy_equal_to_its_reference_has_no_preference_at_the_start(runs: dict[str, RunFolder], name: str) -> None:
    start = runs[name].lines[0]
    assert start["step"] == 0
    assert (start["eval/accuracy"], start["eval/margin"]) == (0.5, 0)


@pytest.mark.parametrize(("ranks", "count", "calls"), [(1, 1024, 1), (1, 1025, 2), (3, 3 * 1024 + 1, 2), (3, 2, 1)])
def test_evaluation_calls_have_at_most_1024_pairs_per_rank_and_at_least_one(ranks: int, count: int, calls: int) -> None:
    batch = Batch.from_rows({"tokens": [[number] for number in range(2 * count)]})
    parts = in_calls(batch, ranks)
    assert len(parts) == calls
    assert all(ranks <= len(part) <= 2 * 1024 * ranks for part in parts)
    assert Batch.concat(parts)["tokens"].equal(batch["tokens"])


@pytest.mark.parametrize("option", ["data.path", "evaluation.path"])
def test_a_missing_file_is_reported_before_a_model_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path / "cache"))
    assert main([f"{option}={tmp_path}/none.jsonl", f"run_dir={tmp_path}/run"]) == 2
    assert f"{option}={tmp_path}/none.jsonl" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_tilde_in_a_path_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ("model.path", "reference.path", "data.path", "evaluation.path")
    config = read_config([f"{name}=~/{name}" for name in names])
    assert {name: attrgetter(name)(config) for name in names} == {name: f"{tmp_path}/{name}" for name in names}


@pytest.mark.parametrize("other", ["padded", "fine", "fsdp"])
def test_precision_packing_and_micro_batches_do_not_change_the_result_of_dpo(
    runs: dict[str, RunFolder], other: str
) -> None:
    assert difference(runs["plain"], runs[other]) < 1e-4
    for one, two in zip(runs["plain"].lines, runs[other].lines, strict=True):
        for name in ("actor/loss", "actor/margin", "actor/nll", "eval/loss"):
            assert one.get(name) == pytest.approx(two.get(name), abs=1e-4)


@pytest.mark.full
def test_training_on_two_ranks_matches_one_rank(
    runs: dict[str, RunFolder], policy: Path, ray_address: str, tmp_path: Path
) -> None:
    run = Run(
        "dpo", ray_address, tmp_path / "run", f"model.path={policy}", *SHORT.split(), "placement.ranks_per_node=2"
    ).wait()
    assert run.code == 0, run.err
    assert difference(runs["plain"], run) < 1e-4
    assert run.summary["score"] == pytest.approx(runs["plain"].summary["score"], abs=1e-6)
    assert run.left_behind() == []


def test_another_model_can_be_the_reference(runs: dict[str, RunFolder], models: tuple[Path, Path]) -> None:
    run, z = runs["two models"], gaps(*models)
    start = run.lines[0]
    assert start["eval/loss"] == pytest.approx(sum(math.log(1 + math.exp(-0.7 * x)) for x in z) / 3, abs=1e-5)
    assert start["eval/margin"] == pytest.approx(0.7 * sum(z) / 3, abs=1e-5)
    assert start["eval/accuracy"] == pytest.approx(sum(x > 0 for x in z) / 3, abs=1e-5)
    assert run.summary["status"] == "finished"


def test_adapters_are_trained_and_merged_into_the_saved_model(runs: dict[str, RunFolder], policy: Path) -> None:
    run = runs["adapters"]
    first, *_, last = [line["eval/loss"] for line in run.lines if "eval/loss" in line]
    assert last < first - 0.02
    saved, start = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (run.run_dir / "checkpoints" / "step_5" / "hf", policy)
    )
    changed = {name for name in start if not start[name].equal(saved[name])}
    assert changed == {name for name in start if name.endswith("proj.weight")}


def test_losses_without_reference_take_means_over_the_tokens(models: tuple[Path, Path]) -> None:
    policy = models[0]
    batch = pairs_of(policy, ROWS)
    pairs = [[transformers_logprobs(policy, row["prompt"], row[k]) for k in ("chosen", "rejected")] for row in ROWS]
    # An impossible token before the first one has the log-probability 0, as in the loss.
    means = [[sum(x) / len(x) for x in pair] for pair in pairs]
    simpo = [math.log(1 + math.exp(-(2 * (c - r) - 0.3))) for c, r in means]
    odds = [[x - math.log(1 - math.exp(x)) for x in pair] for pair in means]
    orpo = [-c + 2 * math.log(1 + math.exp(-(o - p))) for (c, _), (o, p) in zip(means, odds, strict=True)]
    for name, expected in (("simpo", simpo), ("orpo", orpo)):
        config = made(loss=name, beta=2.0, simpo_gamma=0.3)
        output = loss(load_policy(policy), batch, Totals(tokens=1, sequences=6), config)
        assert output.loss.item() == pytest.approx(sum(expected) / 3, abs=2e-5)


@pytest.mark.nightly
def test_training_improves_the_true_reward_of_the_policy(tmp_path: Path) -> None:
    start = Path(resolve_model("warm_start:sort"))
    # As in tiny.yaml, which is read because no model is set, with half of the pairs.
    run = run_locally("dpo", tmp_path, {"run": ["seed=1", "data.max_samples=2760", "evaluation.held_out=200"]})["run"]
    assert run.summary["steps"] == 40
    # 2,560 training pairs in three calls: each pair has the reference's log-probabilities of its own responses.
    assert run.lines[1]["actor/margin"] == pytest.approx(0, abs=1e-4)
    end = run.run_dir / "checkpoints" / "step_40" / "hf"
    # Measured: greedy .04 -> .94, sampled .19 -> .75.
    assert truth(end, 0) > truth(start, 0) + 0.6
    assert truth(end, 1) > truth(start, 1) + 0.35
    assert run.summary["score"]["end"] > 0.85


def truth(folder: Path, temperature: float) -> float:
    """Return the share of 300 held-out prompts that a policy answers correctly."""
    task = get_task("sort")
    rows, tokenizer = task.rows("heldout", 300, seed=0), load_tokenizer(folder)
    encoder = TextEncoder(tokenizer)
    prompts = Batch.from_rows(
        {"tokens": [encoder.encode_prompt(row["input"]) for row in rows]},
        per_sequence={"prompt_id": torch.arange(300), "sample_id": torch.zeros(300, dtype=torch.int64)},
    )
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=8)
    done = HFRolloutEngine(folder).generate(prompts, sampling)
    responses = done["tokens"].split(done.lengths.tolist())
    texts = [
        tokenizer.decode(response[length:], skip_special_tokens=True)
        for response, length in zip(responses, prompts.lengths.tolist(), strict=True)
    ]
    return sum(task.score(str(text), row["label"]) for text, row in zip(texts, rows, strict=True)) / 300


# --- options

FLAT = """--pretrain m --ref_pretrain r --ref_offload --dataset d --eval_dataset e --eval_split test --prompt_key p
    --chosen_key c --rejected_key w --apply_chat_template --max_samples 9 --max_len 99 --train_batch_size 64
    --micro_train_batch_size 2 --max_epochs 3 --beta 0.2 --ipo --nll_loss_coef 0.3 --learning_rate 5e-7
    --lr_warmup_ratio 0.05 --lr_scheduler cosine_with_min_lr --l2 0.1 --adam_betas 0.9 0.99 --zero_stage 3 --bf16
    --gradient_checkpointing --packing_samples --lora_rank 8 --lora_alpha 16 --target_modules q_proj v_proj
    --save_path s --save_steps 5 --ckpt_path k --load_checkpoint --logging_steps 5 --eval_steps 7 --seed 3
    --aux_loss_coef 0 --use_wandb true"""
NEW = """--model.model_name_or_path m --ref.model_name_or_path r --ref.offload --data.dataset d --eval.dataset e
    --eval.split test --data.prompt_key p --data.chosen_key c --data.rejected_key w --data.apply_chat_template
    --data.max_samples 9 --data.max_len 99 --train.batch_size 64 --train.micro_batch_size 2 --train.max_epochs 3
    --model.beta 0.2 --model.ipo_enable --model.nll_loss_coef 0.3 --adam.lr 5e-7 --lr_warmup_ratio 0.05
    --lr_scheduler cosine_with_min_lr --adam.weight_decay 0.1 --adam.betas 0.9 0.99 --ds.zero_stage 3 --bf16
    --model.gradient_checkpointing_enable --ds.packing_samples --ds.lora.rank 8 --ds.lora.alpha 16
    --ds.lora.target_modules q_proj v_proj --ckpt.output_dir s --ckpt.save_steps 5 --ckpt.path k --ckpt.load_enable
    --logger.logging_steps 5 --eval.steps 7 --train.seed 3 --model.aux_loss_coef 0 --optim adam
    --logger.wandb.key true"""


def test_option_names_of_openrlhf_0_9_and_0_10_have_the_same_meaning() -> None:
    flat, new = (read_config(["run_dir=x", *text.split()]) for text in (FLAT, NEW))
    assert flat == new
    algorithm = flat.algorithm
    assert (flat.model.path, flat.reference.path, algorithm.beta, algorithm.ipo, algorithm.nll_loss_coef) == (
        "m",
        "r",
        0.2,
        True,
        0.3,
    )
    train = flat.train
    assert (train.learning_rate, train.betas, train.lora_target_modules) == (5e-7, (0.9, 0.99), "q_proj,v_proj")
    assert (train.batch_size, train.micro_batch_size, train.epochs, train.precision) == (64, 2, 3, "bf16")
    assert (flat.data.max_tokens, flat.data.max_samples, flat.evaluation.every) == (99, 9, 7)
    assert (flat.checkpoint.export_path, flat.checkpoint.path, flat.checkpoint.every) == ("s", "k", 5)


def test_the_defaults_are_those_of_openrlhf() -> None:
    config = read_config(["model.path=m", "data.path=d"])
    algorithm, train = config.algorithm, config.train
    assert (train.batch_size, train.epochs, train.learning_rate) == (128, 1, 1e-5)
    assert (train.lr_scheduler, train.lr_warmup_ratio, train.min_lr_ratio) == ("cosine_with_min_lr", 0.03, 0.1)
    assert (config.data.max_tokens, algorithm.beta, algorithm.label_smoothing, algorithm.ipo) == (512, 0.1, 0.0, False)
    assert (algorithm.nll_loss_coef, config.reference.path, config.data.prompt_key) == (0.0, None, None)


def test_the_plan_has_one_role_with_one_gpu_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry_run", "placement.ranks_per_node=4", "placement.nodes=2"]) == 0
    roles = json.loads(capsys.readouterr().out)["roles"]
    machines = {name: (role["nnodes"], role["nproc_per_node"]) for name, role in roles.items()}
    assert machines == {"TRAINER": (1, 1), "ACTOR": (2, 4)}
    assert [role["resource"]["accelerator"] for role in roles.values()] == [0, 1]


@pytest.mark.parametrize(("loss", "examples"), [("dpo", "200 pairs"), ("kto", "500 responses")])
def test_the_plan_counts_a_pair_as_two_responses_of_kto(
    loss: str, examples: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["data.path=task:sort", "data.max_samples=300", "evaluation.held_out=100", "train.batch_size=50"]
    assert main(["--dry_run", f"algorithm.loss={loss}", *options, "train.epochs=1"]) == 0
    count = int(examples.partition(" ")[0])
    facts = [f"{count // 50} optimizer steps", examples, "100 held out"]
    assert re.search(says(*facts), json.loads(capsys.readouterr().out)["arithmetic"])


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["data.path={rows}", "data.chosen_key=better"], ["data.path={rows}", "row 0", "'better'"]),
        (["data.path={rows}", "evaluation.path={rows}", "evaluation.split=test"], ["evaluation.path={rows}", "test"]),
        (["data.path={empty}"], ["data.path={empty}"]),
        (["data.path={rows}", "reference.path={other}"], ["reference.path={other}", "vocabulary", "model.path="]),
        (["data.path={rows}", "reference.path=nobody/has-this"], ["reference.path=nobody/has-this"]),
        (["data.path=task:sport"], ["data.path=task:sport"]),
        (["data.path=task:sort", "evaluation.path=task:sort"], ["evaluation.path=task:sort", "evaluation.held_out"]),
        (
            ["data.path={rows}", "algorithm.ipo=true", "algorithm.label_smoothing=0.1"],
            ["algorithm.label_smoothing=0.1", "algorithm.ipo"],
        ),
        (["data.path={rows}", "algorithm.beta=0"], ["algorithm.beta=0.0"]),
        (["data.path={rows}", "train.batch_size=1", "placement.ranks_per_node=2"], ["train.batch_size=1", "2 ranks"]),
        (["data.path={rows}", "data.prompt_key=prompt", "data.max_samples=0"], ["data.max_samples=0"]),
        (["data.path={rows}", "load_in_4bit=true"], ["load_in_4bit", "lora_rank"]),
        (["data.path={rows}", "algorithm.loss=kto", "algorithm.ipo=true"], ["algorithm.loss=kto", "ipo"]),
        (
            ["data.path={rows}", "algorithm.loss=orpo", "algorithm.nll_loss_coef=0.5"],
            ["algorithm.nll_loss_coef=0.5", "algorithm.loss=orpo"],
        ),
        (["data.path={rows}", "algorithm.loss=kto", "data.completion_key=chosen"], ["row 0", "both 'chosen'"]),
    ],
)
def test_bad_input_is_reported_in_one_line_with_exit_code_2(
    options: list[str],
    facts: list[str],
    models: tuple[Path, Path],
    policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"rows": f"{tmp_path}/rows.jsonl", "empty": f"{tmp_path}/empty.jsonl", "other": str(policy)}
    Path(names["rows"]).write_text("\n".join(map(json.dumps, ROWS)))
    Path(names["empty"]).write_text("")
    run_dir = tmp_path / "run"
    assert main([f"run_dir={run_dir}", f"model.path={models[0]}", *(text.format(**names) for text in options)]) == 2
    error = capsys.readouterr().err
    assert re.search(says(*(fact.format(**names) for fact in facts)), error)
    assert error.count("\n") == 1
    assert not run_dir.exists()
