"""Job descriptions: plans, and errors raised before anything starts."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from core import DLJobBuilder, Job, JobBuilder, JobError, RLJobBuilder, RLRoleType
from core.placement import _gpus_of_this_machine, assumed_devices, detect_devices
from core.plan import Placement
from tests.messages import says


def rl_job() -> RLJobBuilder:
    """Return a builder of a trainer and two actor ranks on CPU."""
    builder = RLJobBuilder().device_type("CPU")
    builder.trainer("workers.Script").resource(cpu=2)
    builder.actor("workers::Echo").nnodes(1).nproc_per_node(2)
    return builder


def test_the_plan_names_processes_resources_and_bundles() -> None:
    plan = json.loads(rl_job().build().model_dump_json())
    assert plan["roles"]["ACTOR"]["entrypoint"] == "workers:Echo"
    assert plan["roles"]["ACTOR"]["kind"] == "train"
    assert plan["placement"]["processes"] == {"TRAINER": 1, "ACTOR": 2}
    assert plan["placement"]["devices"] == {"TRAINER": 0, "ACTOR": 0}
    assert [host["workers"] for host in plan["placement"]["hosts"]] == [
        [["TRAINER", 0]],
        [["ACTOR", 0]],
        [["ACTOR", 1]],
    ]
    assert [bundle["cpu"] for bundle in plan["placement"]["bundles"]] == [2, 2]


def test_a_job_can_be_restored_from_its_json() -> None:
    job = rl_job().config({"steps": 3}).build()
    assert Job.model_validate_json(job.model_dump_json()) == job


def test_collocated_roles_share_each_device_in_equal_parts() -> None:
    builder = RLJobBuilder().device_type("GPU").device_per_node(2)
    builder.actor("workers.Echo").nproc_per_node(2).resource(cpu=3, accelerator=1)
    builder.rollout("workers.Echo").total(2).resource(cpu=1, accelerator=1)
    builder.with_collocation("actor", "Rollout")
    placement = builder.build().placement
    assert [(bundle.cpu, bundle.accelerator) for bundle in placement.bundles] == [(4, 1), (4, 1)]
    assert [(host.name, host.bundle, host.accelerator) for host in placement.hosts] == [
        ("ACTOR-0", 0, 0.5),
        ("ACTOR-1", 1, 0.5),
        ("ROLLOUT-0", 0, 0.5),
        ("ROLLOUT-1", 1, 0.5),
    ]


def engines_beside_ranks(engines: int, devices: int, ranks: int = 4, nodes: int = 1) -> Placement:
    """Return the placement of ranks, engines with several devices each, and references on nodes of four devices.

    All of them are collocated.
    """
    builder = RLJobBuilder().device_type("GPU").device_per_node(4).node_num(nodes)
    builder.actor("workers.Echo").nnodes(nodes).nproc_per_node(ranks // nodes).resource(accelerator=1)
    builder.rollout("workers.Echo").total(engines).resource(cpu=devices, accelerator=devices)
    builder.reference("workers.Echo").total(ranks).resource(accelerator=1)
    return builder.with_collocation("actor", "rollout", "reference").build().placement


def test_an_engine_of_two_devices_reserves_them_and_the_two_ranks_see_one_each() -> None:
    placement = engines_beside_ranks(engines=2, devices=2)
    # A bundle has two ranks, an engine with two cores, and two references: 6 cores, 2 devices.
    assert [(bundle.cpu, bundle.accelerator) for bundle in placement.bundles] == [(6, 2), (6, 2)]
    assert [(host.name, host.bundle, host.accelerator, host.shown) for host in placement.hosts] == [
        ("ACTOR-0", 0, 0, [0]),
        ("ACTOR-1", 0, 0, [1]),
        ("ACTOR-2", 1, 0, [0]),
        ("ACTOR-3", 1, 0, [1]),
        ("ROLLOUT-0", 0, 2, []),
        ("ROLLOUT-1", 1, 2, []),
        ("REFERENCE-0", 0, 0, [0]),
        ("REFERENCE-1", 0, 0, [1]),
        ("REFERENCE-2", 1, 0, [0]),
        ("REFERENCE-3", 1, 0, [1]),
    ]
    # Each of the three roles has a third of the four devices.
    assert placement.devices == pytest.approx(dict.fromkeys(("ACTOR", "ROLLOUT", "REFERENCE"), 4 / 3), abs=1e-3)


def test_engines_of_all_devices_of_a_node_are_on_the_nodes_of_their_ranks() -> None:
    placement = engines_beside_ranks(engines=2, devices=4, ranks=8, nodes=2)
    assert [(bundle.accelerator, bundle.machine) for bundle in placement.bundles] == [
        (4, ("ACTOR", 0)),
        (4, ("ACTOR", 1)),
    ]


@pytest.mark.parametrize(
    ("engines", "devices", "ranks", "nodes", "facts"),
    [
        (1, 8, 8, 2, ["ACTOR has 2 x 4 x 1", "ROLLOUT has 1 x 1 x 8"]),
        (1, 8, 8, 1, ["ACTOR + ROLLOUT + REFERENCE", "8 devices on one node", "a node has 4"]),
        (4, 2, 4, 1, ["ACTOR has 1 x 4 x 1", "ROLLOUT has 1 x 4 x 2"]),
        (1, 3, 4, 1, ["ACTOR has 1 x 4 x 1", "ROLLOUT has 1 x 1 x 3"]),
    ],
)
def test_engines_that_do_not_fit_the_collocated_ranks_raise_an_error_that_names_the_roles(
    engines: int, devices: int, ranks: int, nodes: int, facts: list[str]
) -> None:
    with pytest.raises(JobError, match=says(*facts)):
        engines_beside_ranks(engines, devices, ranks, nodes)


def test_ranks_of_one_node_share_a_bundle() -> None:
    builder = RLJobBuilder().device_type("GPU").device_per_node(4).node_num(2)
    builder.actor("workers.Echo").nnodes(2).nproc_per_node(4).resource(accelerator=1)
    placement = builder.build().placement
    assert [bundle.accelerator for bundle in placement.bundles] == [4, 4]
    assert [host.bundle for host in placement.hosts] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_roles_of_one_process_name_share_processes_rank_by_rank() -> None:
    builder = RLJobBuilder().device_type("CPU")
    builder.actor("workers.Echo").nproc_per_node(2).process("hybrid")
    builder.rollout("workers.Echo").total(2).process("hybrid")
    builder.with_collocation("actor", "rollout")
    assert [host.name for host in builder.build().placement.hosts] == ["ACTOR-0+ROLLOUT-0", "ACTOR-1+ROLLOUT-1"]


def test_the_number_of_threads_is_the_number_of_whole_cores_by_default() -> None:
    builder = RLJobBuilder().device_type("CPU")
    builder.trainer("workers.Script").resource(cpu=0.5)
    builder.actor("workers.Echo").resource(cpu=2.5)
    builder.rollout("workers.Echo").resource(cpu=1, threads=4)
    # A process with two roles has the cores of both as threads, or the larger explicit number.
    for first, second, threads in (("reward", "reference", 0), ("judge", "tool", 3)):
        builder.role(first).run("workers.Echo").resource(cpu=1, threads=threads).process(first)
        builder.role(second).run("workers.Echo").resource(cpu=1).process(first)
        builder.with_collocation(first, second)
    hosts = {host.name: host.threads for host in builder.build().placement.hosts}
    assert hosts == {"TRAINER-0": 1, "ACTOR-0": 2, "ROLLOUT-0": 4, "REWARD-0+REFERENCE-0": 2, "JUDGE-0+TOOL-0": 3}


def test_too_many_devices_raise_an_error_with_both_numbers() -> None:
    builder = RLJobBuilder().device_type("GPU").device_per_node(2)
    builder.actor("workers.Echo").nproc_per_node(2).resource(accelerator=1)
    builder.rollout("workers.Echo").total(2).resource(accelerator=1)
    with pytest.raises(JobError, match=says("4 devices", "ACTOR 2", "ROLLOUT 2", "1 node", 2)):
        builder.build()


def test_more_devices_on_one_node_than_it_has_are_refused_by_the_name_of_the_role() -> None:
    builder = RLJobBuilder().device_type("GPU").device_per_node(4).node_num(4)
    builder.actor("workers.Echo").nproc_per_node(4).resource(accelerator=1)
    builder.rollout("workers.Echo").total(1).resource(accelerator=8)
    with pytest.raises(JobError, match=says("ROLLOUT", "8 devices on one node", 4)):
        builder.build()


def test_assumed_devices_replace_the_detected_ones() -> None:
    def job() -> Job:
        builder = RLJobBuilder()
        builder.actor("workers.Echo").nproc_per_node(3).resource(accelerator=1)
        return builder.build()

    token = assumed_devices.set(3)
    try:
        planned = job()
        assert (planned.device_type, planned.device_per_node, planned.placement.devices) == ("GPU", 3, {"ACTOR": 3})
        assumed_devices.set(0)
        assert job().device_type == "CPU"
        assumed_devices.set(2)
        with pytest.raises(JobError, match=says("ACTOR", "3 devices", 2)):
            job()
    finally:
        assumed_devices.reset(token)


def test_gpus_are_counted_by_nvidia_smi_if_proc_does_not_list_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "GPU 0: H200 (UUID: GPU-1)"\necho "GPU 1: H200 (UUID: GPU-2)"\n')
    program.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    _gpus_of_this_machine.cache_clear()
    in_proc = len([*Path("/proc/driver/nvidia/gpus").glob("*")])
    try:
        assert detect_devices() == (in_proc or 2)
    finally:
        _gpus_of_this_machine.cache_clear()


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: JobBuilder().build(), ["role("]),
        (lambda: RLJobBuilder().trainer("workers.Script").build(), ["actor"]),
        (lambda: rl_job().actor("workers.Echo"), ["ACTOR", "role("]),
        (lambda: JobBuilder().run("workers.Echo"), ["run", "workers.Echo", "role("]),
        (lambda: JobBuilder().total(2), ["nproc_per_node", "run("]),
        (lambda: rl_job().total(-1), ["nproc_per_node", -1]),
        (lambda: rl_job().concurrency(0), ["concurrency", 0]),
        (lambda: rl_job().resource(gpu=1), ["gpu", "accelerator"]),
        (lambda: rl_job().max_restarts(-1), ["max_restarts", -1]),
        (lambda: rl_job().recovery(max_restarts=-2), ["max_restarts", -2]),
        (lambda: rl_job().recovery(stop_grace=-1), ["stop_grace", -1]),
        (lambda: rl_job().recovery(stall_timeout=-1), ["stall_timeout", -1, 5]),
        (lambda: rl_job().recovery(stall_timeout=4), ["stall_timeout", 4, 5]),
        (lambda: rl_job().recovery(placement_timeout=0), ["placement_timeout", 0]),
        (lambda: rl_job().env({"RANK": "3"}), ["RANK"]),
        (lambda: rl_job().global_env({"A": 1}).build(), ["A=1"]),  # pyright: ignore[reportArgumentType]
        (lambda: rl_job().with_collocation("actor", "critic").build(), ["ACTOR", "CRITIC"]),
        (lambda: rl_job().with_collocation("actor", "trainer").build(), ["ACTOR", 2, "TRAINER", 1]),
        (lambda: JobBuilder().role("a").run("main"), ["main", "package.module:Class"]),
        (lambda: RLJobBuilder().trainer(""), ["''", "package.module:Class"]),
        (lambda: JobBuilder().role("a").run("nowhere.Echo").build(), ["A", "nowhere"]),
        (lambda: JobBuilder().role("a").run("workers.Ecko").build(), ["A", "Ecko", "Echo"]),
        (lambda: rl_job().device_type("TPU").build(), ["TPU", "CPU", "GPU"]),  # pyright: ignore[reportArgumentType]
    ],
)
def test_an_invalid_description_raises_an_error_with_the_setting_to_change(
    make: Callable[[], object], facts: list[object]
) -> None:
    with pytest.raises(JobError, match=says(*facts)):
        make()


def test_the_job_has_all_settings_of_the_builder() -> None:
    builder = RLJobBuilder().config({"a": 1}).node_num(2).device_per_node(4).device_type("GPU").global_env({"G": "1"})
    builder.trainer("workers.Script")
    builder.actor("workers.Echo").nnodes(2).nproc_per_node(2).resource(accelerator=1).env({"A": "1"})
    builder.critic("workers.Echo").nproc_per_node(2).resource(accelerator=1)
    builder.rollout("workers.Echo").total(2).env(None)
    builder.reward("workers.Echo").total(3)
    builder.reference("workers.Echo").total(1)
    job = builder.build()
    assert {role: (spec.total, spec.backend) for role, spec in job.workloads.items()} == {
        "TRAINER": (1, "simple"),
        "ACTOR": (4, "elastic"),
        "CRITIC": (2, "elastic"),
        "ROLLOUT": (2, "simple"),
        "REWARD": (3, "simple"),
        "REFERENCE": (1, "simple"),
    }
    assert (job.config, job.node_num, job.device_per_node, job.device_type) == ({"a": 1}, 2, 4, "GPU")
    assert (job.global_env, job.roles["ACTOR"].env, job.roles["ROLLOUT"].env) == ({"G": "1"}, {"A": "1"}, {})


def test_three_collocated_roles_have_a_third_each_and_two_collocations_are_separate() -> None:
    builder = RLJobBuilder().device_type("GPU").device_per_node(4)
    for role in (builder.actor, builder.critic, builder.rollout, builder.reward, builder.reference):
        role("workers.Echo").total(2).resource(accelerator=1)
    builder.with_collocation("actor", "rollout", "reward").with_collocation("critic", "reference")
    placement = builder.build().placement
    assert placement.devices == {"ACTOR": 0.6666, "CRITIC": 1, "ROLLOUT": 0.6666, "REWARD": 0.6666, "REFERENCE": 1}
    assert len(placement.bundles) == 4


def test_collocation_all_excludes_the_trainer_and_the_named_roles() -> None:
    builder = RLJobBuilder().device_type("GPU").device_per_node(2)
    builder.trainer("workers.Script")
    for role in (builder.actor, builder.rollout, builder.reward):
        role("workers.Echo").total(1).resource(accelerator=1)
    assert builder.with_collocation_all("reward").build().collocations == [["ACTOR", "ROLLOUT"]]


def test_custom_resources_are_reserved_for_all_ranks_of_a_node() -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("a").train("workers.Echo").nproc_per_node(2).resource(cpu=1, fpga=0.5)
    placement = builder.build().placement
    assert [bundle.custom for bundle in placement.bundles] == [{"fpga": 1.0}]
    assert [host.custom for host in placement.hosts] == [{"fpga": 0.5}] * 2


def test_the_submitter_of_the_openrlhf_guide_builds_and_prints_its_job() -> None:
    # Copied from multi_role_openrlhf.md with other classes.
    args = Namespace(lr=1e-6, actor_num_nodes=1, actor_num_gpus_per_node=2, vllm_num_engines=2, ref_num_nodes=1)
    builder = RLJobBuilder().config(OmegaConf.create(vars(args)))
    builder.trainer("workers.Script").resource(cpu=4)
    (
        builder.actor("workers.Echo")
        .resource(accelerator=1)
        .nnodes(args.actor_num_nodes)
        .nproc_per_node(args.actor_num_gpus_per_node)
    )
    builder.rollout("workers.Echo").resource(accelerator=1).total(args.vllm_num_engines)
    (
        builder.role(RLRoleType.REFERENCE.name)
        .train("workers.Echo")
        .resource(accelerator=0.4)
        .nnodes(args.ref_num_nodes)
        .nproc_per_node(1)
    )
    job = builder.build()
    printed = json.loads(job.model_dump_json(indent=2))
    assert printed["config"] == vars(args)
    assert list(printed["roles"]) == ["TRAINER", "ACTOR", "ROLLOUT", "REFERENCE"]


def test_the_submitter_of_the_verl_guide_builds_its_job() -> None:
    # Copied from multi_role_verl.md with other classes. The configuration is one that Hydra would return.
    config = OmegaConf.create({"trainer": {"nnodes": 1, "n_gpus_per_node": 2}, "gpus": "${trainer.n_gpus_per_node}"})
    nodes = config.trainer.nnodes
    gpus = config.gpus
    builder = (
        DLJobBuilder()
        .global_env({"VLLM_WORKER_MULTIPROC_METHOD": "spawn"})
        .node_num(nodes)
        .device_per_node(gpus)
        .config(config)
    )
    for role in ("actor_rollout", "critic", "rm", "ref"):
        builder.role(role).train("workers.Echo").total(gpus)
    builder.role("trainer").run("workers.Script").resource(cpu=4)
    builder.with_collocation_all("trainer")
    job = builder.build()
    assert job.collocations == [["ACTOR_ROLLOUT", "CRITIC", "RM", "REF"]]
    assert json.loads(job.model_dump_json())["config"] == OmegaConf.to_container(config)
    OmegaConf.resolve(config)
    assert json.loads(job.model_dump_json())["config"]["gpus"] == 2


def test_a_job_can_be_changed_as_in_the_guides() -> None:
    job = rl_job().build()
    for workload in job.workloads.values():
        if workload.backend == "elastic":
            workload.comm_pre_check = False
            workload.comm_auto_setup_process_group = False
    assert [workload.backend for workload in job.workloads.values()] == ["simple", "elastic"]
    for name in ("comm_pre_check", "comm_auto_setup_process_group"):
        with pytest.raises(ValueError, match=name):
            setattr(job.workloads["ACTOR"], name, True)


def test_a_role_in_two_collocations_raises_an_error() -> None:
    builder = rl_job().with_collocation("actor").with_collocation("actor")
    with pytest.raises(JobError, match="ACTOR"):
        builder.build()
