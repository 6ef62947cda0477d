"""The real TRL compared with recipes/dpo, reward_model and sft, and with the diffs of docs/variants.md: the same data
and weights, three training steps.
"""

# pyright: reportMissingImports=false
# TRL is in the environment that scripts/oracle.sh makes, and in no other.
from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from differences import Differences
from recipe_copies import copied
from steps import EPS, SIZE, STEPS, Apart, Trace, make_model, make_steps, roles, weights_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from variants_page import DIFFS, PAIR_LOSSES, SLIC

from components.batch import Batch
from components.data.supervised import DemonstrationFormat, encode_demonstrations
from components.rl.preference_losses import kto_kl, kto_loss, orpo_loss, simpo_loss

RATE = 1e-3
PAIRS = SIZE // 2


@dataclass
class Case:
    recipe: str
    name: str
    options: str
    """Options of the recipe."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of TRL's configuration."""
    why: str = ""
    """Reasons of intended differences."""
    diff: str = ""
    """Diff in docs/variants.md, applied to a copy of the recipe."""
    line: str = ""
    """Line that replaces the SLiC loss of the diff. Empty keeps it."""


def data_of(path: str) -> list[Batch]:
    """Return each step's responses. Pairs alternate chosen and rejected, and are sorted by a margin."""
    batches = []
    for step in make_steps(path):
        place_N = torch.arange(step.num_tokens) - step.offsets[step.sequence_ids]
        mask_N = place_N >= step["prompt_length"][step.sequence_ids]
        margin_B = (torch.arange(PAIRS) / PAIRS).repeat_interleave(2)
        batches.append(Batch(step.lengths, {"tokens": step["tokens"], "loss_mask": mask_N}, {"margin": margin_B}))
    return batches


def make_start(recipe: str, folder: Path) -> str:
    """Return the folder of the initial model."""
    path = make_model(folder / "model")
    if recipe != "reward_model":
        return path
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")
    return str(folder / "start")


def package_of(case: Case, folder: Path) -> str:
    """Return the package of the recipe, or of a copy with the diff."""
    if not case.diff:
        return f"recipes.{case.recipe}"
    copied(case.recipe, folder / "recipes" / "my_algo")
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply"], cwd=folder, env=env, input=case.diff, text=True, check=True)
    path = folder / "recipes" / "my_algo" / "algorithm.py"
    text = path.read_text(encoding="utf-8")
    assert SLIC in text or not case.line
    path.write_text(text.replace(SLIC, case.line) if case.line else text, encoding="utf-8")
    importlib.invalidate_caches()
    return "my_algo"


def ours(case: Case, path: str, folder: Path) -> Trace:
    package, size = package_of(case, folder), SIZE if case.recipe == "sft" else PAIRS
    common = f"""run_dir={folder}/run model.path={path} data.path=task:sort train.batch_size={size}
        train.learning_rate={RATE} train.betas=[0.9,0.999] train.eps={EPS} train.weight_decay=0 train.max_grad_norm=1
        train.lr_scheduler=constant train.lr_warmup_ratio=0 train.zero_stage=2 train.engine=fsdp"""
    read_config = importlib.import_module(f"{package}.main").read_config
    config = read_config([*common.split(), *case.options.split()]).resolved(0)
    cls = getattr(importlib.import_module(f"{package}.roles.{ROLES[case.recipe].lower()}"), ROLES[case.recipe])
    trace, steps = Trace(), data_of(path)
    with roles(folder / "run") as stage:
        model = stage.role(cls, config)
        if case.recipe == "dpo":
            model["load_reference"](path)
            logprobs = [model["reference_logprobs"](step)["logprob"] for step in steps]
            steps = [step.with_sequences(reference_logprob=x) for step, x in zip(steps, logprobs, strict=True)]
            model["drop_reference"]()
        model["load"](path, STEPS)
        for step in steps:
            metrics = model["train_step"](step)
            trace.losses.append(metrics["loss"])
            trace.grad_norms.append(metrics["grad_norm"])
        model["save"](str(folder / "after"))
    trace.weights = weights_of(opened(case.recipe, str(folder / "after")))
    return trace


def opened(recipe: str, path: str) -> Any:
    if recipe == "reward_model":
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    return AutoModelForCausalLM.from_pretrained(path)


class Tokenized(DPOTrainer):
    """Data collator for pairs that are already tokenized, as the two others."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset


def rows_of(case: Case, path: str) -> list[dict[str, Any]]:
    """Return the data in the format of TRL's trainers."""
    rows = []
    for step in data_of(path):
        tokens = step.lists("tokens")
        starts = [int((~step.row(i, "loss_mask")).sum()) for i in range(SIZE)]
        if case.recipe == "sft":
            labels = [[-100] * start + row[start:] for row, start in zip(tokens, starts, strict=True)]
            rows += [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]
            continue
        for i in range(0, SIZE, 2):
            pair = {"chosen_ids": tokens[i], "rejected_ids": tokens[i + 1]}
            if case.recipe == "dpo":
                pair = {name: row[starts[i] :] for name, row in pair.items()} | {"prompt_ids": tokens[i][: starts[i]]}
            margin = {"margin": float(step["margin"][i])} if "margin" in case.options else {}
            rows.append(pair | margin)
    return rows


def theirs(case: Case, path: str, folder: Path) -> Trace:
    settings = {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": SIZE if case.recipe == "sft" else PAIRS,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "adam_epsilon": EPS,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    config, cls = TRAINERS[case.recipe]
    trainer = cls(
        model=opened(case.recipe, path),
        args=config(**settings | case.settings),
        train_dataset=Dataset.from_list(rows_of(case, path)),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "grad_norm" in line]
    losses, norms = ([float(line[name]) for line in lines] for name in ("loss", "grad_norm"))
    return Trace(losses=losses, grad_norms=norms, weights=weights_of(trainer.model))


ROLES = {"dpo": "Actor", "sft": "Actor", "reward_model": "Reward"}
TRAINERS: dict[str, tuple[Any, Any]] = {
    "dpo": (DPOConfig, Tokenized),
    "sft": (SFTConfig, SFTTrainer),
    "reward_model": (RewardConfig, RewardTrainer),
}
LINES = DIFFS["Losses of the log-ratios"]
MEANS = DIFFS["IPO of means"]
SMOOTHED = ("robust", "exo_pair")
DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")


def pair_loss(name: str, line: str) -> Case:
    """Return the options of a line in the page's table of pair losses, next to TRL's loss of that name."""
    setting = {"f_divergence_type": name} if name in DIVERGENCES else {"loss_type": [name]}
    if name not in SMOOTHED:
        return Case("dpo", name, "", setting, diff=LINES, line=line)
    return Case("dpo", name, "algorithm.label_smoothing=0.1", setting | {"label_smoothing": 0.1}, diff=LINES, line=line)


CASES = [
    Case("sft", "the defaults", ""),
    Case("reward_model", "the defaults", ""),
    Case("reward_model", "with margins", "algorithm.margin_loss=true"),
    Case(
        "reward_model",
        "center_rewards_coefficient",
        "",
        {"center_rewards_coefficient": 0.01},
        diff=DIFFS["center_rewards_coefficient"],
    ),
    Case("dpo", "the defaults", ""),
    Case("dpo", "beta 0.5", "algorithm.beta=0.5", {"beta": 0.5}),
    Case(
        "dpo",
        "IPO",
        "algorithm.ipo=true",
        {"loss_type": ["ipo"]},
        "log-ratios are sums here, as in the paper and in OpenRLHF, and means there; the next row has means",
    ),
    Case("dpo", "IPO of means", "algorithm.ipo=true", {"loss_type": ["ipo"]}, diff=MEANS),
    Case("dpo", "sigmoid_norm", "", {"loss_type": ["sigmoid_norm"]}, diff=MEANS),
    *(pair_loss(name, line) for name, line in PAIR_LOSSES.items()),
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Also a name for a copy of a recipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path / "recipes")
        yield tmp_path
        for name in [name for name in sys.modules if name.partition(".")[0] == "my_algo"]:
            del sys.modules[name]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.recipe}, {case.name}")
def test_the_recipe_matches_trl(case: Case, folder: Path, differences: Differences) -> None:
    path = make_start(case.recipe, folder)
    start = weights_of(opened(case.recipe, path))
    apart = Apart.of(ours(case, path, folder), theirs(case, path, folder), start)
    differences.hold("trl", f"{case.recipe}: {case.name}", apart, case.why)


def trainer_with(**options: Any) -> Any:
    """Return the attributes of a trainer that TRL's loss functions read."""
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x)
    return SimpleNamespace(accelerator=accelerator, label_smoothing=0.0, **options)


def kto_loss_of_trl(
    policy_BT: Any, reference_B: Any, policy_kl_BT: Any, reference_kl_B: Any, is_desirable_B: Any, **options: Any
) -> tuple[Any, float]:
    """Return TRL's KTO loss and KL estimate of responses with these log-probabilities after a prompt of one token."""
    ids_BT = torch.zeros(len(policy_BT), policy_BT.shape[1] + 1, dtype=torch.int64)
    mask_BT = torch.ones_like(ids_BT)
    completion_BT = mask_BT.clone()
    completion_BT[:, 0] = 0
    inputs = {"input_ids": ids_BT, "attention_mask": mask_BT, "completion_mask": completion_BT, "label": is_desirable_B}
    inputs |= {"KL_input_ids": ids_BT + 1, "KL_attention_mask": mask_BT, "KL_completion_mask": completion_BT}
    inputs |= {"ref_logps": reference_B, "ref_KL_logps": reference_kl_B}

    class Model:
        """Return the given log-probabilities: those of mismatched responses for token ids of 1."""

        training = True

        def __call__(self, input_ids: Any, **_: Any) -> SimpleNamespace:
            logprob_BT = policy_kl_BT if input_ids.any() else policy_BT
            zeros_BT = torch.zeros_like(logprob_BT)
            return SimpleNamespace(log_probs=logprob_BT, entropy=zeros_BT, mean_logits=zeros_BT)

    flags = {"loss_type": "kto", "calculate_KL": True, "precompute_ref_logps": True, "aux_loss_enabled": False}
    trainer = trainer_with(**flags, **options, model=Model(), _total_train_tokens=0, _tp_size=1)
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer._compute_kl_logps = partial(KTOTrainer._compute_kl_logps, trainer)
    loss = KTOTrainer._compute_loss(trainer, trainer.model, inputs, False)
    return loss, trainer._metrics["train"]["kl"][0]


def test_kto_matches_the_loss_of_trl() -> None:
    torch.manual_seed(0)
    policy_BT, policy_kl_BT = -torch.rand(6, 3), -torch.rand(6, 3)
    reference_B, reference_kl_B = -5 * torch.rand(6), -5 * torch.rand(6)
    is_desirable_B = torch.tensor([True, True, False, True, False, False])
    options = {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7}
    theirs, kl = kto_loss_of_trl(policy_BT, reference_B, policy_kl_BT, reference_kl_B, is_desirable_B, **options)
    ours_kl = kto_kl(policy_kl_BT.sum(1) - reference_kl_B)
    ours = kto_loss(policy_BT.sum(1) - reference_B, is_desirable_B, ours_kl, 6, 3, **options)
    assert kl > 0.1
    assert float(ours_kl) == pytest.approx(kl, abs=1e-6)
    assert float(ours.loss) == pytest.approx(float(theirs), abs=1e-6)


def test_orpo_and_simpo_match_the_functions_of_trl() -> None:
    torch.manual_seed(0)
    chosen_P, rejected_P = -2 * torch.rand(5), -2 * torch.rand(5)
    ratios, *_ = ORPOTrainer.odds_ratio_loss(trainer_with(beta=0.4), chosen_P, rejected_P)
    ours = orpo_loss(chosen_P, rejected_P, 5, beta=0.4)
    assert float(ours.loss) == pytest.approx(float(-chosen_P.mean() - ratios.mean()), abs=1e-6)
    trainer = trainer_with(beta=2.0, simpo_gamma=0.7, loss_type="simpo", alpha=0.0)
    losses, *_ = CPOTrainer.cpo_loss(trainer, chosen_P, rejected_P)
    ours = simpo_loss(chosen_P, rejected_P, 5, beta=2.0, gamma=0.7)
    assert float(ours.loss) == pytest.approx(float(losses.mean()), abs=1e-6)


@pytest.mark.parametrize(
    ("theirs_row", "ours_row", "form", "adds_end"),
    [
        ({"prompt": "ba", "completion": "ab"}, {"prompt": "ba", "response": "ab"}, DemonstrationFormat(), False),
        # TRL appends an end token to plain texts, as listed in docs/from_trl.md.
        ({"text": "baab"}, {"text": "baab"}, DemonstrationFormat(plain_text=True), True),
    ],
    ids=["prompt and completion", "text"],
)
def test_texts_have_the_same_tokens_except_for_listed_differences(
    theirs_row: dict[str, str], ours_row: dict[str, str], form: DemonstrationFormat, adds_end: bool, tmp_path: Path
) -> None:
    path = make_model(tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    trainer: Any = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(path),
        args=SFTConfig(output_dir=str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to="none"),
        train_dataset=Dataset.from_list([theirs_row]),
        processing_class=tokenizer,
    )
    (row,) = list(trainer.train_dataset)
    batch = encode_demonstrations([ours_row], tokenizer, form).batch
    tokens = batch["tokens"].tolist()
    end = [tokenizer.eos_token_id] if adds_end else []
    assert row["input_ids"] == [*tokens, *end]
    if "completion_mask" in row:
        assert row["completion_mask"] == batch["loss_mask"].int().tolist()
