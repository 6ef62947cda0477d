"""What models take, worked by hand, and the plan that every recipe shows before it starts."""

import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from components.engines.config import HFRolloutConfig, TrainConfig, VLLMRolloutConfig
from components.engines.memory import (
    PROCESS_BYTES,
    ModelSize,
    Need,
    frozen,
    micro_batch_tokens,
    model_size,
    sampling,
    together,
    training,
)
from core import JobBuilder
from recipes.grpo.config import GRPOConfig
from tests.messages import says
from training.options import DataOptions, ModelOptions, PlacementOptions
from training.plan import Capacity, Plan, amount, gpu_bytes, steps_text
from training.rl_options import PolicyTrainOptions

RECIPES = ("dpo", "grpo", "multi_turn", "openrlhf_ppo", "reinforce_pp", "reward_model", "sft", "verl_ppo")
LARGE = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
"""Llama 3's config.json of 70 billion parameters."""
GB = 1_000_000_000
ACTOR = "actor_rollout_ref.actor"


def folder_of(path: Path, config: dict[str, Any], **files: dict[str, list[int]]) -> str:
    """A model's folder: config.json, and weight files that are only headers, as name -> shape."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for name, shapes in files.items():
        entries = {key: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for key, shape in shapes.items()}
        header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        (path / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return str(path)


# --- sizes


def test_parameters_of_published_models_follow_from_their_config(tmp_path: Path) -> None:
    size = model_size(folder_of(tmp_path / "large", LARGE))
    assert size is not None
    # As its model card has it; the output layer is 128256 x 8192.
    assert (size.parameters, size.head) == (70_553_706_496, 1_050_673_152)
    small = {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
    small |= {"num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True}
    found = model_size(folder_of(tmp_path / "small", small))
    assert found is not None
    assert (found.parameters, found.head, found.queries, found.keys) == (494_032_768, 0, 896, 128)


def test_weight_files_are_counted_by_their_headers_whatever_the_architecture(tmp_path: Path) -> None:
    shapes = {"embed.weight": [10, 4], "norm.weight": [4], "lm_head.weight": [10, 4]}
    found = model_size(folder_of(tmp_path / "own", {"model_type": "own"}, model=shapes))
    assert found == ModelSize(parameters=84, head=40)
    # Of several files the index says which; without all of them only the config is left, which says nothing here.
    path = folder_of(tmp_path / "parts", {"model_type": "own"}, a={"x": [3, 5]}, b={"y": [2]})
    index = Path(path) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    assert model_size(path) == ModelSize(parameters=17)
    (Path(path) / "b.safetensors").unlink()
    assert model_size(path) is None


def test_a_model_that_is_still_to_be_made_has_the_tiny_shape() -> None:
    size = model_size("warm_start:sort")
    # 20 tokens x 128; two layers of 2 x 128 x (128 + 64) + 3 x 128 x 384 + 256 of norms + 256 of biases; a last norm.
    assert size is not None
    assert size.parameters == 2_560 + 2 * 197_120 + 128 == 396_928
    assert model_size("new:sort") == size
    assert (model_size("new:text"), model_size("warm_start:nothing"), model_size("/no/such/folder")) == (None,) * 3


# --- training


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Of 1000 parameters, on 4 ranks: weights, gradients, Adam's states with the master weights.
        ({}, (4000, 4000, 8000)),
        ({"zero_stage": 1}, (4000, 4000, 3000)),
        ({"zero_stage": 2}, (4000, 1000, 3000)),
        ({"zero_stage": 3}, (1000, 1000, 3000)),
        # bfloat16 has master weights, which ZeRO keeps in any case.
        ({"precision": "bf16"}, (2000, 4000, 3000)),
        ({"precision": "bf16", "zero_stage": 3}, (500, 1000, 3000)),
        ({"precision": "bf16_autocast"}, (4000, 4000, 8000)),
        ({"engine": "fsdp", "zero_stage": 3}, (1000, 1000, 2000)),
        ({"engine": "fsdp", "zero_stage": 2, "precision": "bf16"}, (1000, 1000, 2000)),
    ],
)
def test_what_is_partitioned_is_divided_by_the_ranks(options: dict[str, Any], expected: tuple[int, int, int]) -> None:
    need = training(ModelSize(parameters=1000), TrainConfig(**options), 4, tokens=10)
    assert (need.weights, need.gradients, need.optimizer) == expected
    assert (need.passes, need.is_known) == (None, False)  # of an unknown architecture


SMALL = ModelSize(
    parameters=100_000, layers=2, hidden=10, queries=10, keys=5, intermediate=30, vocabulary=100, positions=64
)


def test_adapters_alone_have_gradients_and_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    need = training(SMALL, TrainConfig(lora_rank=2), 1, tokens=10)
    # In and out: q, o 10 + 10, k, v 10 + 5, gate, up, down 10 + 30: 190 numbers x rank 2 x 2 layers = 760.
    assert (need.weights, need.gradients, need.optimizer) == (4 * 100_760, 4 * 760, 8 * 760)
    some = training(SMALL, TrainConfig(lora_rank=2, lora_target_modules="q_proj,v_proj"), 1, tokens=10)
    assert some.gradients == 4 * 2 * 2 * (20 + 15)


def test_activations_grow_with_tokens_and_shrink_with_checkpointing() -> None:
    # A layer and token: 7 x 10 + 4 x 10 + 4 x 30 = 230 numbers; a quarter more; logits twice, and the head's gradient.
    rest = 2 * 4 * 100 * 16 + 4 * 100 * 10
    need = training(SMALL, TrainConfig(), 1, tokens=16)
    assert need.passes == 16 * (2 * 230 * 4) * 5 // 4 + rest
    less = training(SMALL, TrainConfig(gradient_checkpointing=True), 1, tokens=16)
    assert less.passes == 16 * (230 * 4 + 2 * 10 * 4) * 5 // 4 + rest
    # ZeRO's gradients wait in a buffer: beside each other 2 x 4 x 100000 more.
    assert training(SMALL, TrainConfig(zero_stage=2), 1, tokens=16).passes == need.passes + 800_000
    # FSDP gathers the embedding, 100 x 10, which stays, two layers of (100000 - 1000) / 2, and a layer's gradient.
    whole = training(SMALL, TrainConfig(engine="fsdp", zero_stage=3), 2, tokens=16)
    assert whole.passes == need.passes + 4 * (1_000 + 99_000 + 50_000)


def test_what_is_offloaded_or_sleeps_is_on_the_machine() -> None:
    config = TrainConfig(zero_stage=2, precision="bf16", adam_offload=True, ema_beta=0.9)
    need = training(ModelSize(parameters=1000), config, 2, tokens=1, gpu=True, publishes=True)
    assert (need.weights, need.gradients, need.optimizer, need.host) == (2000, 0, 0, 2000 + 6000)
    assert (need.first, need.published) == (4000, 2 * 2000)
    # Gradients that are not partitioned are on the GPU until the step ends; then a rank's half is on the machine.
    config = TrainConfig(zero_stage=1, adam_offload=True)
    need = training(ModelSize(parameters=1000), config, 2, tokens=1, gpu=True)
    assert (need.weights, need.gradients, need.optimizer, need.host) == (4000, 4000, 0, 2000 + 6000)
    asleep = training(ModelSize(parameters=1000), TrainConfig(), 1, tokens=1, gpu=True, sleeps=True)
    assert (asleep.certain, asleep.host) == (16_000, 16_000)
    shared = VLLMRolloutConfig(enable_sleep=True, tensor_parallel_size=2)
    engine = sampling(ModelSize(parameters=1000), shared, 1, 1, GB, gpu=True)
    assert (engine.weights, engine.host) == (2000, 4000)  # of both devices


def test_a_head_over_the_vocabulary_is_not_a_critics() -> None:
    size = ModelSize(parameters=1000, head=300)
    assert frozen(size, "bfloat16", tokens=1, has_head=False).weights == 1400
    assert training(size, TrainConfig(), 1, tokens=1, has_head=False).weights == 2800


def test_a_micro_batch_is_what_the_budget_and_the_step_allow() -> None:
    assert micro_batch_tokens(TrainConfig(max_tokens=1000), 100, 64) == 1000
    assert micro_batch_tokens(TrainConfig(max_tokens=1000), 100, 4) == 400
    assert micro_batch_tokens(TrainConfig(max_tokens=10**9, max_sequences=2), 100, 64) == 200
    assert micro_batch_tokens(TrainConfig(max_tokens=50), 100, 64) == 100  # a longer sequence stands alone


# --- sampling


def test_an_hf_engines_cache_grows_with_rows_and_tokens() -> None:
    need = sampling(SMALL, HFRolloutConfig(max_num_seqs=8), 100, 64, None, gpu=False)
    # 8 rows x 64 tokens x keys and values x 2 layers x 5 numbers x 4 bytes; it is not sure to be taken.
    assert (need.weights, need.cache, need.certain) == (400_000, 8 * 64 * 2 * 2 * 5 * 4, 400_000)
    assert sampling(SMALL, HFRolloutConfig(dtype="bfloat16"), 4, 64, None, gpu=False).cache == 4 * 64 * 2 * 2 * 5 * 2


def test_vllm_takes_its_share_of_a_gpu_or_what_it_is_told_on_a_cpu() -> None:
    shared = VLLMRolloutConfig(dtype="bfloat16", gpu_memory_utilization=0.5, tensor_parallel_size=2)
    size = ModelSize(parameters=10 * GB)
    need = sampling(size, shared, 1, 1, 80 * GB, gpu=True)
    assert (need.weights, need.base + need.certain) == (10 * GB, 40 * GB)
    assert sampling(size, shared, 1, 1, None, gpu=True).cache is None
    told = sampling(size, VLLMRolloutConfig(cpu_cache_gb=2.0), 1, 1, None, gpu=False)
    assert (told.weights, told.cache, told.base) == (40 * GB, 2 * 2**30, PROCESS_BYTES["vllm"])


def test_one_process_that_does_two_things_keeps_both() -> None:
    both = together(Need(weights=1, optimizer=2, passes=5), Need(weights=10, cache=20, passes=3))
    assert (both.weights, both.optimizer, both.cache, both.passes) == (11, 2, 20, 5)
    assert together(Need(weights=None), Need(weights=1)).weights is None


# --- the plan


def plan_of(needs: dict[str, Need], *, device: int | None, collocated: bool = True, kind: Any = "GPU") -> Plan:
    config = GRPOConfig(model=ModelOptions(path="m"), data=DataOptions(path="task:sort"))
    builder = JobBuilder().config(config)
    builder.device_type(kind).device_per_node(8)
    builder.role("TRAINER").run("recipes.grpo.trainer:GRPOTrainer")
    for role in needs:
        builder.role(role).run("recipes.grpo.roles.actor:Actor").total(2).resource(accelerator=1)
    if collocated:
        builder.with_collocation(*needs)
    job = builder.build()
    return Plan(
        recipe="demo",
        job=job,
        config=job.config,
        changed={},
        needs=needs,
        steps="",
        choices=[],
        capacity=Capacity(100 * GB, device),
    )


def learner(**options: Any) -> Need:
    return Need(weights=10 * GB, gradients=10 * GB, optimizer=20 * GB, passes=5 * GB, base=0, **options)


def test_roles_that_share_a_gpu_keep_what_stays_and_take_turns_with_the_rest() -> None:
    sampler = Need(weights=10 * GB, cache=20 * GB, base=0)
    device, machine = json.loads(plan_of({"ACTOR": learner(), "ROLLOUT": sampler}, device=80 * GB).json())["places"]
    assert (device["place"], device["least"], device["most"]) == ("a GPU of ACTOR + ROLLOUT", 70 * GB, 75 * GB)
    assert machine["most"] == PROCESS_BYTES["driver"] + 5 * PROCESS_BYTES["process"]
    # Where both sleep while the other works, the larger one counts.
    needs = {"ACTOR": learner(sleeps=True), "ROLLOUT": Need(weights=10 * GB, cache=20 * GB, base=0, sleeps=True)}
    assert json.loads(plan_of(needs, device=80 * GB).json())["places"][0]["least"] == 40 * GB
    apart = plan_of({"ACTOR": learner(), "ROLLOUT": sampler}, device=80 * GB, collocated=False)
    assert [place["least"] for place in json.loads(apart.json())["places"]] == [40 * GB, 30 * GB, 0]


def options_in(error: pytest.ExceptionInfo[ValueError]) -> list[str]:
    """What a message names to be set, in its order."""
    return re.findall(r"\b(?:train|rollout|placement)\.\w+(?:=\w+)?", str(error.value))


def test_what_is_certain_and_cannot_fit_is_refused_with_what_to_set() -> None:
    plan_of({"ACTOR": learner()}, device=40 * GB).check()  # the activations may be fewer
    with pytest.raises(ValueError, match=says("ACTOR", "40 GB", "39 GB")) as error:
        plan_of({"ACTOR": learner()}, device=39 * GB).check()
    assert "2 x (weights 10 GB, gradients 10 GB, optimizer 20 GB)" in str(error.value)
    assert options_in(error) == ["train.zero_stage=3", "train.lora_rank=16", "train.adam_offload=true"]
    plan = plan_of({"ACTOR": learner(host=60 * GB)}, device=None)
    plan.config = replace(plan.config, train=PolicyTrainOptions(zero_stage=2, adam_offload=True, ema_beta=0.9))
    with pytest.raises(ValueError, match=says("2 x (", "60 GB")) as error:
        plan.check()
    assert options_in(error) == ["train.adam_offload=false", "train.ema_beta=null"]
    plan_of({"ACTOR": learner()}, device=None).check()  # nobody knows what there is
    assert "maybe too much" in "\n".join(plan_of({"ACTOR": learner()}, device=41 * GB).lines())
    plan = plan_of({"A": learner(), "B": learner()}, device=None, collocated=False, kind="CPU")
    plan.config = replace(plan.config, placement=PlacementOptions(actor_ranks=2))
    with pytest.raises(ValueError, match=says("machine", "160 GB", "100 GB")) as error:
        plan.check()
    assert options_in(error) == ["train.lora_rank=16", "placement.actor_ranks"]
    sampler = Need(weights=10 * GB, cache=50 * GB)
    with pytest.raises(ValueError) as error:
        plan_of({"ROLLOUT": sampler}, device=None, collocated=False, kind="CPU").check()
    assert options_in(error) == ["rollout.cpu_cache_gb"]


def test_a_share_that_does_not_hold_an_engines_weights_is_refused() -> None:
    size = ModelSize(parameters=20 * GB)
    need = sampling(size, VLLMRolloutConfig(dtype="bfloat16", gpu_memory_utilization=0.45), 1, 1, 80 * GB, gpu=True)
    # 0.45 x 80 = 36 GB for 20 x 2 GB of weights and 0.6 GB of context.
    assert (need.cache, need.short) == (0, 4_600_000_000)
    plan = plan_of({"ACTOR": Need(), "ROLLOUT": need}, device=80 * GB)
    message = says("ROLLOUT", "36 GB", "41 GB")
    with pytest.raises(ValueError, match=message) as error:
        plan.check()
    assert options_in(error) == ["rollout.tensor_parallel", "rollout.gpu_memory"]
    # A larger share does not help where the GPU is too small, nor do more devices an engine that trains on its own.
    plan.there = Capacity(100 * GB, 40 * GB)
    with pytest.raises(ValueError, match=message) as error:
        plan.check()
    assert options_in(error) == ["rollout.tensor_parallel"]
    plan.needs = {"ROLLOUT": together(need, learner())}
    with pytest.raises(ValueError, match="41 GB") as error:
        plan.check()
    assert options_in(error) == []


def gpus(path: Path, monkeypatch: pytest.MonkeyPatch, *mebibytes: int) -> None:
    """An nvidia-smi that shows GPUs of these sizes, or the first of them where some are chosen by name."""
    sizes = " ".join(map(str, mebibytes))
    responses = f'case $1 in --id=*) echo {mebibytes[0]};; *) printf "%s\\n" {sizes};; esac'
    (path / "nvidia-smi").write_text(f"#!/bin/sh\n{responses}\n")
    (path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    gpu_bytes.cache_clear()


def test_the_machine_of_a_cluster_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    gpus(tmp_path, monkeypatch, 8192)
    here = Capacity.here(1)
    assert ((here.machine or 0) > GB, here.device) == (True, 8 * 2**30)
    assert Capacity.here(1, nodes=2) == Capacity()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert Capacity.here(1) == Capacity()


def test_of_gpus_that_differ_only_those_count_whose_names_are_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    gpus(tmp_path, monkeypatch, 8192, 2048)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # in CUDA's order the fastest, in nvidia-smi's the first on the bus
    assert Capacity.here(1).device is None
    for name, value in (("CUDA_VISIBLE_DEVICES", "GPU-1a2b"), ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")):
        monkeypatch.setenv(name, value)
        assert Capacity.here(1).device == 8 * 2**30
    gpu_bytes.cache_clear()


def test_steps_are_told_where_rows_are_counted_quickly(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n\n{"x": 2}\n')
    assert steps_text(str, f"{tmp_path}/a.jsonl", None) == "2"
    assert steps_text(str, f"{tmp_path}/a.jsonl,task:sort", 9) == "9"
    assert steps_text(str, "task:sort", None) == "10000"
    assert "org/data" in steps_text(str, "org/data", None)
    with (tmp_path / "large.jsonl").open("wb") as file:
        file.truncate(65_000_000)
    assert str(tmp_path / "large.jsonl") in steps_text(str, f"{tmp_path}/large.jsonl", None)


def test_rows_that_are_all_held_out_make_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n' * 20)
    main, shown = import_module("recipes.dpo.main").main, list[str]()
    for held in (256, 4):
        options = ["model.path=p", f"data.path={tmp_path}/a.jsonl", f"evaluation.held_out={held}", "train.batch_size=8"]
        assert main([*options, "train.epochs=3", "--dry_run"]) == 0
        shown.append(json.loads(capsys.readouterr().out)["arithmetic"])
    assert re.search(says("evaluation.held_out=256", "20 pairs"), shown[0])
    assert re.search(says("6 optimizer steps", "8 pairs", "16 pairs", "3 epochs", "4 held out"), shown[1])


def test_amounts_are_short() -> None:
    found = [amount(count) for count in (None, 0, 82_000, 1_640_000, 402_000_000, 999_600_000, 1_347 * GB)]
    assert found == ["?", "-", "82 kB", "1.6 MB", "402 MB", "1 GB", "1,347 GB"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_shows_its_plan_as_a_table_and_as_json(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_module(f"recipes.{recipe}.main").main(["--dry_run", "seed=7", "run_dir=x"]) == 0
    shown = capsys.readouterr()
    plan, lines = json.loads(shown.out), shown.err.splitlines()
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
def test_a_model_that_no_machine_holds_is_refused_before_anything_starts(
    recipe: str,
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("training.plan.Capacity.here", lambda *_: Capacity(machine=512 * GB))
    path = folder_of(tmp_path / "large", LARGE)
    given = [option.format(path) for option in options]
    main = import_module(f"recipes.{recipe}.main").main
    assert main([*given, f"run_dir={tmp_path}/run"]) == 2
    *table, error = capsys.readouterr().err.splitlines()
    assert sum(f"{recipe}: memory" in line for line in table) == 1  # what the refusal is about
    assert re.search(says(f"{recipe}: ", "machine", "512 GB"), error)
    assert ("gradients 282 GB" in error, "cache" in error) == (True, False)
    assert not (tmp_path / "run").exists()
    assert main([*given, "--print_config"]) == 0


@pytest.mark.parametrize(
    ("recipe", "option", "facts"),
    [
        ("grpo", "algorithm.kl_estimator=k3", ["algorithm.kl_estimator", "algorithm.kl_coef=0"]),
        ("openrlhf_ppo", "ema_beta=0.5", ["ema_beta", "enable_ema"]),
        ("verl_ppo", "actor_rollout_ref.ref.fsdp_config.param_offload=true", ["actor_rollout_ref.ref."]),
    ],
)
def test_what_has_no_effect_is_said_with_the_printed_configuration(
    recipe: str, option: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert import_module(f"recipes.{recipe}.main").main(["--print_config", option]) == 0
    shown = capsys.readouterr()
    (note,) = shown.err.splitlines()
    assert re.search(says(f"{recipe}: ", *facts), note)
    assert note not in shown.out


def test_a_key_is_not_shown_among_what_was_changed(capsys: pytest.CaptureFixture[str]) -> None:
    key = "0123456789abcdef0123456789abcdef01234567"
    assert import_module("recipes.openrlhf_ppo.main").main(["--dry_run", "--use_wandb", key]) == 0
    shown = capsys.readouterr()
    assert (key in shown.out + shown.err, json.loads(shown.out)["changed"]["log.wandb_key"]) == (False, "***")
