"""The guide "Reinforcement Learning Integration": each name and behaviour that it describes, in a program of the same
form.
"""

import json
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import core
from core import RLJobBuilder, RLRoleType
from core.backends import BackendName
from tests.guides.rows import check_rows
from tests.messages import says

ALL = ["ACTOR", "REFERENCE", "ROLLOUT", "REWARD", "CRITIC"]


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, Any]]:
    """Findings of the program on each backend on which it ran."""
    return {}


@pytest.fixture
def report(
    backend: BackendName, runs: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Return the results of the program on this backend. It runs once per backend."""
    if backend not in runs:
        out = tmp_path_factory.mktemp("sdk") / "found.json"
        builder = RLJobBuilder().device_type("CPU").config({"lr": 0.1, "out": str(out), "backend": backend})
        builder.trainer("rl_sdk:UserTrainer").resource(cpu=0.1)
        builder.role("actor").run("rl_sdk:UserActorModel").total(2).resource(cpu=0.1)
        builder.rollout("rl_sdk:UserOtherModel").total(2).resource(cpu=0.1)
        for role in (builder.reward, builder.reference, builder.critic):
            role("rl_sdk:UserOtherModel").resource(cpu=0.1)
        builder.with_collocation("actor", "rollout")
        result = builder.build().submit("sdk", backend=backend)
        assert (result.status, result.error) == ("finished", ""), result.traceback
        runs[backend] = json.loads(out.read_text())
    yield runs[backend]


def test_roles_are_an_enum() -> None:
    assert issubclass(RLRoleType, Enum)
    assert issubclass(RLRoleType, str)
    assert {role.value for role in RLRoleType} == {"TRAINER", *ALL}
    assert RLRoleType["ACTOR"] is RLRoleType.ACTOR is RLRoleType("actor")
    assert RLRoleType.ACTOR.name == RLRoleType.ACTOR.value == "ACTOR"


def test_a_workload_has_the_properties_of_the_guide(report: dict[str, Any]) -> None:
    first, second = report["RG_ACTOR"]
    assert (first["name"], second["name"]) == ("ACTOR-0", "ACTOR-1")
    assert (first["role"], second["rank"], second["word_size"], second["world_size"]) == ("ACTOR", 1, 2, 2)
    assert second["config"]["lr"] == 0.1
    assert (second["local_rank"], second["local_world_size"]) == (1, 2)
    assert first["collocation"] == "ACTOR,ROLLOUT"
    assert report["RG_REWARD"][0]["collocation"] is None


@pytest.mark.parametrize("backend", [pytest.param("ray", marks=pytest.mark.full)], indirect=True)
def test_ranks_have_a_rendezvous_address(report: dict[str, Any]) -> None:
    ranks = report["RG_CRITIC"][0]
    assert ranks["torch_master_addr"]
    assert 0 < ranks["torch_master_port"] < 65536


def test_roles_have_the_predicates_of_the_guide(report: dict[str, Any]) -> None:
    by_role = [report[f"RG_{role}"][0]["predicates"] for role in ALL]
    assert by_role == [[i == j for j in range(5)] for i in range(5)]


def test_master_handle_has_a_replacement(report: dict[str, Any]) -> None:
    assert re.search(says("UserTrainer", "master_handle", "self.info", "RoleGroup(role)"), report["master"][1])


def test_methods_without_a_decorator_are_called(report: dict[str, Any]) -> None:
    assert report["init_model"] == ["model of ACTOR-0", "model of ACTOR-1"]
    assert report["update_actor"] == [1, 1]
    assert report["generate"] == ["x y 0", "x y 1"]
    assert report["private"][0] == report["typo"][0] == "AttributeError"
    assert re.search(says("ACTOR", "'updat_actor'", "update_actor"), report["typo"][1])


def test_an_invocation_has_the_options_of_the_guide(report: dict[str, Any]) -> None:
    assert report["a"] == report["b"] == [1, 2]
    assert report["a_later"] == [101, 102]
    assert report["b_filtered"] == [1, 1]
    assert report["between"] == [101, 101]
    assert report["first"] == [1, 2]
    assert report["whole"] == [[1, 2], [1, 2]]
    assert report["update"] == [[1], [2]]
    assert report["error"][0] == "KeyError"


@pytest.mark.parametrize("backend", [pytest.param("ray", marks=pytest.mark.full)], indirect=True)
def test_references_and_handles_can_be_passed_to_ray(report: dict[str, Any]) -> None:
    assert (report["get"], report["wait"]) == ([1, 2], 2)
    assert (report["remote"], report["remote_one"]) == ([2, 2], [7])
    assert report["remote_error"]


@pytest.mark.parametrize("backend", [pytest.param("ray", marks=pytest.mark.full)], indirect=True)
def test_the_caller_sets_the_timeout_of_a_call(report: dict[str, Any]) -> None:
    assert re.search(says("1 s", "ACTOR.late", "0, 1"), report["late"])
    assert report["same_processes"]


def test_a_trainer_has_the_properties_and_methods_of_the_guide(report: dict[str, Any]) -> None:
    assert report["config"] == 0.1
    assert report["handles"] == {"ACTOR": 2, "ROLLOUT": 2, "REWARD": 1, "REFERENCE": 1, "CRITIC": 1}
    assert report["lists"] == [2, 1, 2, 1, 1]
    assert report["groups"] == sorted(f"RG_{role}" for role in ALL)
    assert (report["resource"]["cpu"], report["resource"]["accelerator"]) == (0.1, 0.0)
    assert re.search(says("RG_TOOL", "RG_ACTOR"), report["no_role"][1])


def test_the_imports_of_the_guide_work() -> None:
    from core.trainer import BaseTrainer
    from core.workload import BaseWorkload

    assert (BaseTrainer, BaseWorkload) == (core.BaseTrainer, core.BaseWorkload)
    assert BaseTrainer.__abstractmethods__ == {"init", "fit"}


def test_each_row_of_the_guide_names_a_test_of_this_file() -> None:
    check_rows(Path(__file__))
