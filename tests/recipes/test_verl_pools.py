"""Roles of recipes/verl_ppo, their resource pools, and the resulting job."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from recipes.verl_ppo.adapter import plain_arguments
from recipes.verl_ppo.config import VerlPPOConfig
from recipes.verl_ppo.main import main, read_config
from recipes.verl_ppo.resource_pool import PoolOptions
from tests.messages import says
from tests.recipes.verl_commands import SMALL
from training.options.config import CommandLine, load_config
from training.options.schema import ConfigError

R = "actor_rollout_ref.rollout"


def read(*arguments: str) -> VerlPPOConfig:
    return load_config(VerlPPOConfig, plain_arguments(arguments))


def small(*arguments: str) -> VerlPPOConfig:
    return read(*SMALL, *arguments)


def test_pools_count_processes_and_may_contain_user_roles() -> None:
    pools = PoolOptions(
        pools={"a": [4, 4], "b": [2]}, role_pools={"actor_rollout": "a", "ref": "a", "critic": "b", "judge": "b"}
    )
    assert (pools.workers("ref"), pools.nodes_of("ref"), pools.workers("judge")) == (8, 2, 2)
    assert pools.roles_of("a") == ["actor_rollout", "ref", "rm"]
    assert [pools.holder(part) for part in ("actor", "rollout", "ref")] == ["actor_rollout", "actor_rollout", "ref"]
    assert (pools.is_hybrid, pools.colocate, pools.resolved(0, 2).nodes) == (True, True, 2)


def test_separate_engines_have_their_own_devices() -> None:
    options = [
        "actor_rollout_ref.hybrid_engine=False",
        "trainer.n_gpus_per_node=4",
        f"{R}.tensor_model_parallel_size=2",
    ]
    config = small(*options)
    assert (config.placement.spec, config.roles[:2]) == ({"train": [2], "sample": [2]}, ["actor", "rollout"])
    placed = config.placement.resolved(4, 2, config.rollout.tensor_parallel)
    assert (placed.actor_ranks, placed.rollout_engines) == (2, 1)
    # one_step_off_policy and fully_async_policy: asynchronous generation on separate machines.
    ahead = ["trainer.nnodes=2", "trainer.n_gpus_per_node=4", "rollout.nnodes=1", "rollout.n_gpus_per_node=8"]
    config = read_config([*SMALL, "actor_rollout_ref.hybrid_engine=False", *ahead])
    assert config.placement.pools == {"train": [4, 4], "sample": [8]}
    assert (config.placement.nodes, config.asynchronous.ahead, config.prompts_per_step) == (3, 1, 64)
    stream = ["async_training.staleness_threshold=0.5", "async_training.trigger_parameter_sync_step=4"]
    stream += ["async_training.require_batches=2", "async_training.partial_rollout=True", "data.train_batch_size=0"]
    config = read_config([*SMALL, *ahead, *stream, "rollout.total_rollout_steps=1280", "data.gen_batch_size=1"])
    # Four times two mini-batches of 16 prompts between two weight syncs.
    assert (config.prompts_per_step, config.mini_batch_size, config.max_steps) == (128, 128, 10)
    assert (config.asynchronous.queue_size, config.asynchronous.partial_rollout) == (1, True)


SPECS = "resource_pool_specs=[{id:a,nnodes:2,n_gpus_per_node:4,max_colocate_count:2},{id:b,n_gpus_per_node:2}]"
IDS = ["actor_rollout_ref.actor.resource_pool_id=a", f"{R}.resource_pool_id=b", "critic.resource_pool_id=a"]


def test_named_pools_of_verl_place_the_roles() -> None:
    line = CommandLine(VerlPPOConfig, plain_arguments([*SMALL, SPECS, *IDS]))
    placement = line.config().placement
    assert (placement.pools, placement.nodes) == ({"a": [4, 4], "b": [2]}, 3)
    assert placement.role_pools == {"actor": "a", "rollout": "b", "critic": "a"}
    assert any(re.search(says("max_colocate_count", "share its devices"), note) for note in line.notes)
    # Nodes for generation enable asynchronous generation. The named pools place the roles.
    ahead = small(SPECS, *IDS, "rollout.nnodes=1", "rollout.n_gpus_per_node=2")
    assert (ahead.placement.pools, ahead.asynchronous.enabled) == ({"a": [4, 4], "b": [2]}, True)


def test_named_pools_without_the_pools_of_the_policy_are_rejected() -> None:
    with pytest.raises(ConfigError, match=says("resource_pool_specs", "actor.resource_pool_id")):
        small(SPECS, IDS[0])
    with pytest.raises(ConfigError, match=says("resource_pool_specs", "set id")):
        small("resource_pool_specs=[{nnodes:1}]", *IDS)
    notes = CommandLine(VerlPPOConfig, plain_arguments([*SMALL, *IDS])).notes
    assert any(re.search(says("no effect", "resource_pool_id", "trainer.nnodes"), note) for note in notes)


@pytest.mark.parametrize("hybrid", ["actor_rollout", "actor_rollout_ref"])
def test_multi_device_engines_are_a_separate_role_on_the_devices_of_the_ranks(
    hybrid: str, capsys: pytest.CaptureFixture[str]
) -> None:
    role = f"trainer.role_mapping={{{hybrid}: global_pool}}"
    devices = ["trainer.nnodes=2", "trainer.n_gpus_per_node=4", f"{R}.tensor_model_parallel_size=2", f"{R}.name=vllm"]
    plan = planned(capsys, role, *devices, "algorithm.use_kl_in_reward=true", "--assume_devices=4x2")
    assert [dict(re.findall(r"(\w+) (\d-\d)", line)) for line in plan["nodes"]] == [
        {"actor": "0-3", "rollout": "0-1", "critic": "0-3", "ref": "0-3"},
        {"actor": "4-7", "rollout": "2-3", "critic": "4-7", "ref": "4-7"},
    ]
    shown = {host["workers"][0][0]: (host["accelerator"], host["shown"]) for host in plan["placement"]["hosts"]}
    # The last call of each role.
    assert shown == {"TRAINER": (0, []), "ACTOR": (0, [1]), "ROLLOUT": (2, []), "CRITIC": (0, [1]), "REF": (0, [1])}


def test_engines_that_do_not_divide_the_devices_of_their_pool_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    three = ["trainer.n_gpus_per_node=4", f"{R}.tensor_model_parallel_size=3", "--assume_devices=4"]
    assert main([*SMALL, *three, "--dry_run"]) == 2
    assert re.search(says(f"{R}.tensor_model_parallel_size=3", "4 on each", "divisor"), capsys.readouterr().err)


def test_a_reward_model_may_have_a_separate_pool() -> None:
    options = ["reward_model.enable=True", "reward_model.model.path=m", "reward_model.enable_resource_pool=True"]
    config = read_config(
        [*SMALL, *options, "trainer.n_gpus_per_node=1", "reward_model.nnodes=1", "reward_model.n_gpus_per_node=2"]
    )
    assert config.placement.pools == {"global_pool": [1], "reward": [2]}
    assert (config.placement.workers("rm"), config.placement.workers("critic"), config.placement.nodes) == (2, 1, 2)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return the plan that `--dry_run` prints."""
    assert main([*SMALL, "data.max_response_length=64", *arguments, "--dry_run"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_roles_of_one_pool_share_processes_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "algorithm.use_kl_in_reward=true")
    kinds = {name: (role["kind"], role["nproc_per_node"]) for name, role in plan["roles"].items()}
    assert kinds == {
        "TRAINER": ("run", 1),
        "ACTOR_ROLLOUT": ("train", 1),
        "CRITIC": ("train", 1),
        "REF": ("run", 1),
    }
    assert plan["roles"]["REF"]["entrypoint"] == "recipes.verl_ppo.roles.actor_rollout_ref:ActorRolloutRefWorker"
    assert len(plan["placement"]["hosts"]) == 4
    shared = planned(capsys, "algorithm.use_kl_in_reward=true", "trainer.share_processes=true")
    assert [worker for host in shared["placement"]["hosts"][1:] for worker in host["workers"]] == [
        ["ACTOR_ROLLOUT", 0],
        ["CRITIC", 0],
        ["REF", 0],
    ]
    assert len(shared["placement"]["hosts"]) == 2


def test_roles_of_different_pools_have_separate_devices(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(
        capsys,
        "+trainer.resource_pool_spec.train=[2]",
        "+trainer.resource_pool_spec.sample=[1]",
        "trainer.role_mapping={actor:train,critic:train,rollout:sample}",
        "async_train=true",
    )
    assert {name: role["nproc_per_node"] for name, role in plan["roles"].items()} == {
        "TRAINER": 1,
        "ACTOR": 2,
        "CRITIC": 2,
        "ROLLOUT": 1,
    }
    assert plan["roles"]["ROLLOUT"]["kind"] == "run"


def test_a_printed_configuration_can_be_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["critic.optim.lr=3e-5", "trainer.role_mapping={actor_rollout: global_pool, critic: global_pool}"]
    assert main([*SMALL, *options, "--print_config"]) == 0
    (tmp_path / "c.yaml").write_text(capsys.readouterr().out)
    assert read(f"--config={tmp_path / 'c.yaml'}") == small(*options)


def test_one_key_changes_the_demonstration_to_grpo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithm.adv_estimator=grpo", "--dry_run"]) == 0
    assert list(json.loads(capsys.readouterr().out)["roles"]) == ["TRAINER", "ACTOR_ROLLOUT"]
