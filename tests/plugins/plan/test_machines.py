"""Plans for other machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from core.placement import detect_devices
from plugins.assumed_machines.machines import Machines, assuming
from plugins.plan.capacity import Capacity
from tests.model_folders import folder_of
from training.launch.launch import threads_each
from training.launch.machines import assumed
from training.options.placement_options import PlacementOptions

RECIPES = ("dpo", "grpo", "multi_turn", "openrlhf_ppo", "reinforce_pp", "reward_model", "sft", "verl_ppo")
GB = 10**9


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def eight_by_two() -> Iterator[None]:
    """Assume two machines with eight GPUs each."""
    with assuming(Machines(8, 2, 80 * GB)):
        yield


def plan_of(capsys: pytest.CaptureFixture[str], recipe: str, *options: str) -> tuple[int, dict[str, Any], str]:
    """Return exit code, plan and messages of a dry run."""
    code = import_module(f"recipes.{recipe}.main").main(["--dry_run", *options])
    printed = capsys.readouterr()
    return code, json.loads(printed.out or "{}"), printed.err


def test_all_queries_of_the_machine_return_the_assumed_ones(eight_by_two: None) -> None:
    assert detect_devices() == 8
    assert Capacity.of_machine(8) == Capacity(None, 80 * GB)
    assert threads_each(2) == -2  # number of their cores, which is not known
    with assuming(Machines(0)):
        assert (detect_devices(), Capacity.of_machine(0)) == (0, Capacity())
    assert detect_devices() == 8


def test_after_the_plan_queries_return_this_machine_again() -> None:
    before = detect_devices(), Capacity.of_machine(0)
    with pytest.raises(KeyError), assuming(Machines(7)):
        raise KeyError
    assert (detect_devices(), Capacity.of_machine(0), assumed()) == (*before, None)


def test_memory_is_summed_per_node_and_equal_nodes_are_grouped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["placement.nodes=4", "rollout.engine=hf"]
    _, plan, output = plan_of(capsys, "grpo", "--assume_devices=2x4x80GB", *options)
    most = {place["place"]: place["most"] for place in plan["places"]}
    assert list(most) == ["a GPU of ACTOR + ROLLOUT", "node 1", "each of nodes 2-4"]
    # The trainer and the driver are on the first node, with two ranks and two engines. Rank 0 passes on 396,928 weights
    # in float32. During the start, ranks read weights in float32 on their way to the GPU, and engines in bfloat16.
    reading = 2 * (4 + 2) * 396_928
    assert most["each of nodes 2-4"] == 4 * 400_000_000 + reading
    assert most["node 1"] == 5 * 400_000_000 + 250_000_000 + 4 * 396_928 + reading
    assert "each of nodes 2-4" in output


def test_each_node_has_a_verdict_on_its_memory_and_its_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # Qwen2.5-72B: 16 ranks on two nodes, and two engines of 8 GPUs on two other nodes.
    shape = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    shape |= {"intermediate_size": 29568, "vocab_size": 152064, "model_type": "qwen2", "tie_word_embeddings": False}
    path = folder_of(tmp_path / "large", shape)
    options = [f"model.path={path}", "data.path=task:sort", "placement.nodes=4", "placement.colocate=false"]
    options += ["placement.actor_nodes=2", "rollout.tensor_parallel=8", "train.engine=fsdp", "train.zero_stage=3"]
    output = {}
    # 72.7 GB of states per GPU, and about 52 GB of activations and gathered layers.
    for gigabytes, verdict in ((80, "maybe too much"), (141, "fits")):
        machines = f"--assume_devices=8x4x{gigabytes}GBx1000GB"
        _, plan, output[gigabytes] = plan_of(capsys, "grpo", machines, *options)
        first, second, *others = plan["verdicts"].values()
        assert (first, second) == (verdict, verdict)
        assert others == ["fits"] * 2
    assert "node 4: rollout 1; 8 of 8 GPUs; fits" in output[80]
    _, plan, output[0] = plan_of(capsys, "grpo", "--assume_devices=8x4", *options)
    assert set(plan["verdicts"].values()) == {"not known"}
    assert "--assume_devices=8x4x80GB" in output[0]
    code, _, error = plan_of(capsys, "grpo", "--assume_devices=8x4x80GBx100GB", *options)
    # Two versions of the weights on the first node need 291 GB, but they may be on disk.
    assert (code, "node 1" in error, "maybe too much" in error) == (0, True, True)
    code, _, error = plan_of(capsys, "grpo", "--assume_devices=8x4x64GB", *options)
    assert (code, says_all(error, "ACTOR", "64 GB", "73 GB")) == (2, True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_plans_for_assumed_machines_and_prints_the_assumption(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, plan, output = plan_of(capsys, recipe, "--assume_devices", "8x2x80GB")
    assert code == 0
    assert (plan["device_type"], plan["assumed"]) == ("GPU", "2 machines with 8 GPUs of 80 GB each")
    assert "2 machines with 8 GPUs of 80 GB each, not this one" in output
    gpus = [place for place in plan["places"] if place["place"].startswith("a GPU of")]
    assert {place["there"] for place in gpus} == {80 * GB}
    assert re_of_nodes(plan["nodes"]) != []
    code, plan, output = plan_of(capsys, recipe, "--assume_devices=0x1")
    assert (code, plan["device_type"], "no GPU" in output) == (0, "CPU", True)


def re_of_nodes(lines: list[str]) -> list[str]:
    """Return the lines with the number of used GPUs of a node."""
    return [line for line in lines if "of 8 GPUs" in line]


@pytest.mark.parametrize("recipe", RECIPES)
def test_assumed_machines_are_refused_for_a_run(
    recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = import_module(f"recipes.{recipe}.main").main(["--assume_devices", "8x2", f"run_dir={tmp_path}/run"])
    assert (code, (tmp_path / "run").exists()) == (2, False)
    assert says_all(capsys.readouterr().err, "assume_devices=8x2", "dry_run")
    code, _, output = plan_of(capsys, recipe, "--assume_devices", "eight")
    assert (code, says_all(output, "assume_devices=eight", "8x2")) == (2, True)


def says_all(text: str, *facts: str) -> bool:
    return all(fact in text for fact in facts)


def test_the_policy_and_the_engines_may_be_on_different_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["placement.nodes=2", "placement.colocate=false", "placement.actor_nodes=1", "rollout.tensor_parallel=4"]
    code, plan, _ = plan_of(capsys, "grpo", "--assume_devices=8x2", *options, "algorithm.kl_coef=0")
    assert code == 0
    assert plan["nodes"] == [
        "node 1: trainer 0, actor 0-7; 8 of 8 GPUs",
        "node 2: rollout 0-1; 8 of 8 GPUs",
    ]


def test_a_plan_may_use_half_the_gpus_of_two_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["placement.nodes=2", "placement.devices_per_node=4"]
    code, plan, output = plan_of(capsys, "grpo", "--assume_devices=8x2", *options)
    assert (code, plan["placement"]["processes"]["ACTOR"]) == (0, 8)
    assert "node 2: actor 4-7, rollout 4-7; 4 of 4 GPUs" in output


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["placement.nodes=3"], ["ACTOR", "3 nodes", "2 nodes"]),
        (["placement.devices_per_node=9"], ["placement.devices_per_node=9", "8 GPUs"]),
        (["placement.actor_ranks=32", "placement.nodes=2"], ["ACTOR + ROLLOUT 32", "16", "placement.nodes"]),
        (["placement.actor_nodes=2"], ["placement.actor_nodes=2", "placement.nodes=1"]),
        (["placement.actor_nodes=1", "placement.nodes=2"], ["placement.actor_nodes=1", "placement.colocate=false"]),
        (
            ["placement.colocate=false", "rollout.tensor_parallel=16", "placement.rollout_engines=1"],
            ["rollout.tensor_parallel=16", "a machine has 8 GPUs", "Set at most 8"],
        ),
    ],
)
def test_more_gpus_than_the_cluster_has_are_refused_by_name(
    options: list[str], facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, output = plan_of(capsys, "grpo", "--assume_devices=8x2", *options)
    assert code == 2
    assert says_all(output, *facts), output


def test_supervised_ranks_on_several_nodes_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan, _ = plan_of(capsys, "sft", "--assume_devices=8x2", "placement.nodes=2", "placement.ranks_per_node=8")
    assert (code, plan["nodes"][1]) == (0, "node 2: actor 8-15; 8 of 8 GPUs")


def test_without_gpus_devices_per_node_are_processes() -> None:
    placement = PlacementOptions(nodes=2, devices_per_node=3).resolved(0, 2)
    assert (placement.actor_ranks, placement.rollout_engines) == (6, 6)
    assert PlacementOptions(nodes=2).resolved(0, 2).actor_ranks == 2


def test_on_a_cluster_of_cpus_devices_per_node_are_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, plan, output = plan_of(capsys, "grpo", "placement.nodes=2", "placement.devices_per_node=2", "rollout.engine=hf")
    assert (plan["device_type"], plan["placement"]["processes"]["ACTOR"], plan["assumed"]) == ("CPU", 4, None)
    assert "node 2: actor 2-3" in output


def test_flash_attention_without_a_gpu_is_sdpa_and_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    option = "model.attn_implementation=flash_attention_2"
    code, plan, output = plan_of(capsys, "grpo", "--assume_devices=0x1", option)
    assert (code, plan["config"]["model"]["attn_implementation"]) == (0, "sdpa")
    assert says_all(output, option, "sdpa is used")
    code, plan, output = plan_of(capsys, "grpo", "--assume_devices=1", option)
    assert (code, plan["config"]["model"]["attn_implementation"], "is used" in output) == (
        0,
        "flash_attention_2",
        False,
    )
