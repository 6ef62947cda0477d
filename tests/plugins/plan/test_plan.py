"""The plan that every recipe prints before it starts."""

import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from components.models.size import ModelSize
from core import JobBuilder
from plugins.node_layout.layout import nodes_of
from plugins.plan.capacity import Capacity, gpu_bytes
from plugins.plan.collect import RunMemory
from plugins.plan.memory import PROCESS_BYTES, MemoryEstimate, sampling, together
from plugins.plan.memory_plan import MemoryPlan
from plugins.plan.text import format_bytes
from plugins.vllm.config import VLLMRolloutConfig
from recipes.grpo.config import GRPOConfig
from tests.messages import says
from tests.model_folders import LARGE, folder_of
from training.options.data_options import DataOptions
from training.options.model_options import ModelOptions
from training.options.placement_options import PlacementOptions
from training.options.rl_options import PolicyTrainOptions

RECIPES = ("dpo", "grpo", "multi_turn", "openrlhf_ppo", "reinforce_pp", "reward_model", "sft", "verl_ppo")
GB = 1_000_000_000
ACTOR = "actor_rollout_ref.actor"


# --- the plan


def plan_of(
    estimates: dict[str, MemoryEstimate], *, device: int | None, collocated: bool = True, kind: Any = "GPU"
) -> MemoryPlan:
    train = PolicyTrainOptions(zero_stage=0)
    config = GRPOConfig(model=ModelOptions(path="m"), data=DataOptions(path="task:sort"), train=train)
    builder = JobBuilder().config(config)
    builder.device_type(kind).device_per_node(8)
    builder.role("TRAINER").run("recipes.grpo.trainer:GRPOTrainer")
    for role in estimates:
        builder.role(role).run("recipes.grpo.roles.actor:Actor").total(2).resource(accelerator=1)
    if collocated:
        builder.with_collocation(*estimates)
    job = builder.build()
    estimates = {role: estimates.get(role, MemoryEstimate()) for role in job.placement.processes}
    run = RunMemory(
        job=job,
        config=job.config,
        nodes=nodes_of(job),
        estimates=estimates,
        capacity=Capacity(100 * GB, device),
    )
    return MemoryPlan(run)


def text_of(plan: MemoryPlan) -> str:
    return "\n".join(text for _, text in plan.paragraphs())


def learner(**options: Any) -> MemoryEstimate:
    return MemoryEstimate(weights=10 * GB, gradients=10 * GB, optimizer=20 * GB, passes=5 * GB, base=0, **options)


def test_roles_on_one_gpu_add_fixed_memory_and_share_transient_memory() -> None:
    sampler = MemoryEstimate(weights=10 * GB, cache=20 * GB, base=0, generates=True)
    device, machine = plan_of({"ACTOR": learner(), "ROLLOUT": sampler}, device=80 * GB).fields()["places"]
    assert (device["place"], device["least"], device["most"]) == ("a GPU of ACTOR + ROLLOUT", 70 * GB, 75 * GB)
    assert machine["most"] == PROCESS_BYTES["driver"] + 5 * PROCESS_BYTES["process"]
    # Roles that sleep in turn: the larger phase counts, which is 30 GB of generation, or 40 + 5 GB of training.
    engine = MemoryEstimate(weights=10 * GB, cache=20 * GB, base=0, sleeps=True, generates=True)
    device = plan_of({"ACTOR": learner(sleeps=True), "ROLLOUT": engine}, device=80 * GB).fields()["places"][0]
    assert (device["least"], device["most"]) == (40 * GB, 45 * GB)
    assert device["phases"] == {"generation": 30 * GB, "training": 45 * GB}
    apart = plan_of({"ACTOR": learner(), "ROLLOUT": sampler}, device=80 * GB, collocated=False)
    assert [place["least"] for place in apart.fields()["places"]] == [40 * GB, 30 * GB, 0]


def options_in(error: pytest.ExceptionInfo[ValueError]) -> list[str]:
    """Return the options that a message names, in order."""
    return re.findall(r"\b(?:train|rollout|placement)\.\w+(?:=\w+)?", str(error.value))


def test_fixed_memory_that_cannot_fit_is_refused_with_options_to_set() -> None:
    plan_of({"ACTOR": learner()}, device=40 * GB).check()  # activations may need less
    with pytest.raises(ValueError, match=says("ACTOR", "40 GB", "39 GB")) as error:
        plan_of({"ACTOR": learner()}, device=39 * GB).check()
    assert "2 x (weights 10 GB, gradients 10 GB, optimizer 20 GB)" in str(error.value)
    assert options_in(error) == ["train.zero_stage=3", "train.lora_rank=16", "train.adam_offload=true"]
    plan = plan_of({"ACTOR": learner(host=60 * GB)}, device=None)
    plan.run.config = replace(plan.run.config, train=PolicyTrainOptions(zero_stage=2, adam_offload=True, ema_beta=0.9))
    with pytest.raises(ValueError, match=says("2 x (", "60 GB")) as error:
        plan.check()
    assert options_in(error) == ["train.adam_offload=false", "train.ema_beta=null"]
    plan_of({"ACTOR": learner()}, device=None).check()  # the total is unknown
    assert "maybe too much" in text_of(plan_of({"ACTOR": learner()}, device=41 * GB))
    plan = plan_of({"A": learner(), "B": learner()}, device=None, collocated=False, kind="CPU")
    plan.run.config = replace(plan.run.config, placement=PlacementOptions(actor_ranks=2))
    with pytest.raises(ValueError, match=says("machine", "160 GB", "100 GB")) as error:
        plan.check()
    assert options_in(error) == ["train.lora_rank=16", "placement.actor_ranks"]
    sampler = MemoryEstimate(weights=10 * GB, cache=50 * GB)
    with pytest.raises(ValueError) as error:
        plan_of({"ROLLOUT": sampler}, device=None, collocated=False, kind="CPU").check()
    assert options_in(error) == ["rollout.cpu_cache_gb"]


def test_a_gpu_share_smaller_than_an_engines_weights_is_refused() -> None:
    size = ModelSize(parameters=20 * GB)
    need = sampling(size, VLLMRolloutConfig(dtype="bfloat16", gpu_memory_utilization=0.45), 1, 1, 80 * GB, gpu=True)
    # 0.45 x 80 = 36 GB for 20 x 2 GB of weights, 0.6 GB of CUDA context and 1 GB of CUDA graphs.
    assert (need.cache, need.short) == (0, 5_600_000_000)
    plan = plan_of({"ACTOR": MemoryEstimate(), "ROLLOUT": need}, device=80 * GB)
    message = says("ROLLOUT", "36 GB", "42 GB")
    with pytest.raises(ValueError, match=message) as error:
        plan.check()
    assert options_in(error) == ["rollout.tensor_parallel", "rollout.gpu_memory"]
    # A larger share does not help if the GPU is too small, and more devices do not help an engine without tensor
    # parallelism.
    plan.run.capacity = Capacity(100 * GB, 40 * GB)
    with pytest.raises(ValueError, match=message) as error:
        plan.check()
    assert options_in(error) == ["rollout.tensor_parallel"]
    plan.run.estimates = {"ROLLOUT": together(need, learner())}
    with pytest.raises(ValueError, match="42 GB") as error:
        plan.check()
    assert options_in(error) == []


def gpus(path: Path, monkeypatch: pytest.MonkeyPatch, *mebibytes: int) -> None:
    """Install an nvidia-smi that prints GPUs of these sizes, or only the first one if GPUs are selected by name."""
    sizes = " ".join(map(str, mebibytes))
    responses = f'case $1 in --id=*) echo {mebibytes[0]};; *) printf "%s\\n" {sizes};; esac'
    (path / "nvidia-smi").write_text(f"#!/bin/sh\n{responses}\n")
    (path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    gpu_bytes.cache_clear()


def test_machines_of_a_cluster_are_assumed_to_be_like_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    gpus(tmp_path, monkeypatch, 8192)
    here = Capacity.of_machine(1)
    assert ((here.machine or 0) > GB, here.device, here.is_guess) == (True, 8 * 2**30, False)
    assert Capacity.of_machine(1, nodes=2) == replace(here, is_guess=True)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert Capacity.of_machine(1) == replace(here, is_guess=True)


def test_a_small_gpu_is_refused_and_unknown_host_memory_only_gets_a_verdict() -> None:
    plan = plan_of({"ACTOR": learner(host=60 * GB)}, device=None)
    plan.run.capacity = Capacity(100 * GB, None, is_guess=True)
    plan.check()
    text = text_of(plan)
    assert re.search(says("too much", "other machines", "like this one"), text)
    assert plan.verdicts() == ["too much"]
    plan.run.capacity = Capacity(200 * GB, 39 * GB, is_guess=True)
    with pytest.raises(ValueError, match=says("a GPU of ACTOR", "39 GB")):
        plan.check()
    plan.run.capacity = Capacity(200 * GB, None)
    assert (plan.verdicts(), "--assume_devices=8x1x80GB" in text_of(plan)) == (["not known"], True)


def test_memory_of_different_gpus_is_known_only_for_unambiguous_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    gpus(tmp_path, monkeypatch, 8192, 2048)
    # the fastest GPU in CUDA's order, the first on the bus in nvidia-smi's order
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert Capacity.of_machine(1).device is None
    for name, value in (("CUDA_VISIBLE_DEVICES", "GPU-1a2b"), ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")):
        monkeypatch.setenv(name, value)
        assert Capacity.of_machine(1).device == 8 * 2**30
    gpu_bytes.cache_clear()


def test_data_with_held_out_rows_only_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"chosen": "a", "rejected": "b"}\n' * 20)
    main = import_module("recipes.dpo.main").main
    shown = list[str]()
    for held in (256, 4):
        options = ["model.path=p", f"data.path={tmp_path}/a.jsonl", f"evaluation.held_out={held}", "train.batch_size=8"]
        assert main([*options, "train.epochs=3", "--dry_run"]) == (2 if held == 256 else 0)
        printed = capsys.readouterr()
        shown.append(json.loads(printed.out)["arithmetic"])
        assert ("evaluation.held_out=256 holds out all 20 pairs of data.path" in printed.err) == (held == 256)
    assert re.search(says("evaluation.held_out=256", "20 pairs"), shown[0])
    assert re.search(says("6 optimizer steps", "8 pairs", "16 pairs", "3 epochs", "4 held out"), shown[1])


def test_format_bytes_has_two_or_three_digits() -> None:
    formatted = [format_bytes(count) for count in (None, 0, 82_000, 1_640_000, 402_000_000, 999_600_000, 1_347 * GB)]
    assert formatted == ["?", "-", "82 kB", "1.6 MB", "402 MB", "1 GB", "1,347 GB"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_shows_its_plan_as_a_table_and_as_json(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_module(f"recipes.{recipe}.main").main(["--dry_run", "seed=7", "run_dir=x"]) == 0
    shown = capsys.readouterr()
    plan = json.loads(shown.out)
    lines = shown.err.splitlines()
    assert (plan["changed"]["seed"], "run_dir" in plan["changed"], "dry_run" in plan["changed"]) == (7, False, False)
    assert "steps of" in plan["arithmetic"]
    assert {row["role"] for row in plan["memory"]} == set(plan["placement"]["processes"])
    assert all(row["total"] > 0 for row in plan["memory"])
    assert (len(lines) <= 15, max(map(len, lines)) <= 100) == (True, True)
    assert sum(f"{recipe}: {name}" in shown.err for name in ("memory", "steps", "with", "changed")) == 4


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("grpo", ["model.path={}", "data.path=task:sort"]),
        ("openrlhf_ppo", ["pretrain={}", "prompt_data=task:sort"]),
        ("sft", ["model.path={}", "data.path=task:sort"]),
        (
            "verl_ppo",
            ["actor_rollout_ref.model.path={}", "data.train_files=task:sort", f"{ACTOR}.use_dynamic_bsz=true"],
        ),
    ],
)
def test_a_model_too_large_for_any_machine_is_refused_before_the_start(
    recipe: str,
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("plugins.plan.capacity.Capacity.of_machine", lambda *_: Capacity(machine=512 * GB))
    path = folder_of(tmp_path / "large", LARGE)
    arguments = [option.format(path) for option in options]
    main = import_module(f"recipes.{recipe}.main").main
    assert main([*arguments, f"run_dir={tmp_path}/run"]) == 2
    *table, error = capsys.readouterr().err.splitlines()
    assert sum(f"{recipe}: memory" in line for line in table) == 1  # the subject of the refusal
    assert re.search(says(f"{recipe}: ", "machine", "512 GB"), error)
    assert ("gradients 282 GB" in error, "cache" in error) == (True, False)
    assert not (tmp_path / "run").exists()
    assert main([*arguments, "--print_config"]) == 0


@pytest.mark.parametrize(("layout", "verdict"), [("whole", "maybe too much"), ("sharded", "fits")])
def test_a_large_reference_model_gets_the_advice_to_be_sharded(
    layout: str, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder_of(tmp_path / "large", LARGE)
    arguments = f"""
        model.path={path} data.path=task:sort algorithm.kl_coef=0.1 placement.nodes=4 placement.colocate=false
        train.engine=fsdp train.zero_stage=3 train.adam_offload=true rollout.engine=hf run_dir={tmp_path}/run
        dry_run=true assume_devices=8x4x142GB placement.frozen_models={layout}
    """
    assert import_module("recipes.grpo.main").main(arguments.split()) == 0
    shown = capsys.readouterr()
    # 141 GB of bfloat16 weights, or 18 GB divided over 8 ranks.
    (need,) = [each for each in json.loads(shown.out)["memory"] if each["role"] == "REFERENCE"]
    assert need["weights"] / 1e9 == pytest.approx(141.1 if layout == "whole" else 17.6, abs=0.1)
    said = re.sub(r"\s*\ngrpo: +", " ", shown.err).partition("a GPU of REFERENCE")[2].partition("grpo:")[0]
    assert verdict in said
    assert ("set placement.frozen_models=sharded" in said) == (layout == "whole")


@pytest.mark.parametrize(
    ("recipe", "option", "facts"),
    [
        ("grpo", "algorithm.kl_estimator=k3", ["algorithm.kl_estimator", "algorithm.kl_coef=0"]),
        ("openrlhf_ppo", "ema_beta=0.5", ["ema_beta", "enable_ema"]),
        ("verl_ppo", "actor_rollout_ref.ref.fsdp_config.reshard_after_forward=true", ["actor_rollout_ref.ref."]),
    ],
)
def test_options_without_effect_are_listed_with_the_printed_configuration(
    recipe: str, option: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert import_module(f"recipes.{recipe}.main").main(["--print_config", option]) == 0
    shown = capsys.readouterr()
    (note,) = shown.err.splitlines()
    assert re.search(says(f"{recipe}: ", *facts), note)
    assert note not in shown.out


def test_a_secret_key_is_not_shown_among_the_changed_options(capsys: pytest.CaptureFixture[str]) -> None:
    key = "0123456789abcdef0123456789abcdef01234567"
    assert import_module("recipes.openrlhf_ppo.main").main(["--dry_run", "--use_wandb", key]) == 0
    shown = capsys.readouterr()
    assert (key in shown.out + shown.err, json.loads(shown.out)["changed"]["log.wandb_key"]) == (False, "***")
