"""recipes/dpo with KTO, ORPO and SimPO in complete runs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from local_runs import run_locally
from test_dpo import SHORT, difference, truth
from tiny_models import byte_tokenizer, write_policy

from components.batch import Batch
from components.models.sources import resolve_model
from recipes.dpo.main import read_config
from recipes.dpo.trainer import DPOTrainer

LABELLED = [
    {"prompt": "one plus one is", "completion": " two", "label": True},
    {"prompt": "name a fruit:", "completion": " fig", "label": True},
    {"prompt": "name a fruit:", "completion": " table, they say", "label": False},
]
JUDGED = {
    "kto": "algorithm.loss=kto data.path=task:sort evaluation.held_out=40 data.max_samples=100",
    "kto, fine": "algorithm.loss=kto data.path=task:sort evaluation.held_out=40 data.max_samples=100 "
    "train.micro_batch_size=3 train.zero_stage=0",
    "orpo": "algorithm.loss=orpo",
    "simpo": "algorithm.loss=simpo algorithm.beta=2",
    "labels": "algorithm.loss=kto data.path={rows} evaluation.held_out=0 train.batch_size=3 data.max_tokens=99",
    "kto, resumed": "algorithm.loss=kto data.path=task:sort evaluation.held_out=40 data.max_samples=100 "
    "resume={kto}/checkpoints/step_2",
}


@pytest.mark.full
def test_kto_orpo_and_simpo_train_in_short_runs(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, LABELLED)))
    names = {"rows": tmp_path / "rows.jsonl", "kto": tmp_path / "kto"}
    options = {
        name: [f"model.path={policy}", *SHORT.split(), "checkpoint.every=2", *text.format(**names).split()]
        for name, text in JUDGED.items()
    }
    for text in options.values():
        text.remove("algorithm.nll_loss_coef=0.1")
    options["labels"][0] = f"model.path={write_policy(tmp_path / 'bytes', byte_tokenizer())}"
    runs = run_locally("dpo", tmp_path, options)
    assert {run.summary["status"] for run in runs.values()} == {"finished"}
    start = runs["kto"].lines[0]
    # The policy equals its reference: all log-ratios and the KL estimate are 0, so each loss is 1 - sigmoid(0).
    assert (start["eval/accuracy"], start["eval/kl"], start["eval/loss"]) == (0.5, 0, 0.5)
    assert runs["kto"].lines[-1]["eval/loss"] < 0.5
    assert "40 held out" in runs["kto"].out
    assert "120 of" not in runs["orpo"].out
    assert difference(runs["kto"], runs["kto, fine"]) < 1e-4
    assert difference(runs["kto"], runs["kto, resumed"]) == 0
    assert runs["labels"].summary["steps"] == 1
    for name in ("orpo", "simpo"):
        losses = [line["eval/loss"] for line in runs[name].lines if "eval/loss" in line]
        assert losses[-1] < losses[0]


def test_every_rank_computes_a_mismatched_response_of_a_last_small_minibatch() -> None:
    words = "model.path=m data.path=d algorithm.loss=kto placement.ranks_per_node=4"
    sent: list[list[int]] = []

    def logprobs(_: object, batch: Batch) -> torch.Tensor:
        sent.append(batch["tokens"].tolist())
        return batch["tokens"].float()

    trainer: Any = SimpleNamespace(
        config=read_config(list[str](words.split())), RG_ACTOR=SimpleNamespace(logprobs=None)
    )
    trainer.logprobs = logprobs
    minibatch = Batch.from_rows(
        {"tokens": [[1], [2], [3], [4]]},
        {"reference_logprob": [0.0, 1.0, 0.0, 1.0], "is_desirable": [True, True, False, False]},
    )
    responses = DPOTrainer.with_estimate(trainer, minibatch)
    # Two examples for four ranks. A repeated response does not change the estimate, (2 - 1 + 4 - 1) / 2.
    assert sent == [[2, 4, 2, 4]]
    assert responses["tokens"].tolist() == [1, 3]
    assert responses["kl"].tolist() == [2.0, 2.0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "greedy", "sampled"),
    [
        ("algorithm.loss=kto train.epochs=1", 0.4, 0.2),
        ("algorithm.loss=simpo algorithm.beta=2", 0.4, 0.2),
        ("algorithm.loss=orpo algorithm.beta=1", 0.4, 0.2),
    ],
    ids=["kto", "simpo", "orpo"],
)
def test_the_other_losses_improve_the_true_reward(options: str, greedy: float, sampled: float, tmp_path: Path) -> None:
    start = Path(resolve_model("warm_start:sort"))
    words = ["seed=1", "data.max_samples=2760", "evaluation.held_out=200", *options.split()]
    run = run_locally("dpo", tmp_path, {"run": words})["run"]
    end = run.run_dir / "checkpoints" / f"step_{run.summary['steps']}" / "hf"
    assert truth(end, 0) > truth(start, 0) + greedy
    assert truth(end, 1) > truth(start, 1) + sampled
