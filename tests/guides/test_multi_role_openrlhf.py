"""The guide "Multi-Role Training (OpenRLHF)": its submitter, its roles, its remote calls and its training loop."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from openrlhf_ppo.main import main

import core
from plugins.monitoring.endpoint import MetricsEndpoint, RunState
from tests.guides.rows import check_rows
from tests.messages import says


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, Any]]:
    """Reports of the trainer by backend."""
    return {}


@pytest.fixture
def report(backend: str, runs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report of the trainer on this backend. The job runs once per backend."""
    if backend not in runs:
        out = tmp_path_factory.mktemp("openrlhf") / "found.json"
        ranks = "2" if backend == "ray" else "1"
        arguments = ["--actor_num_gpus_per_node", ranks, "--backend", backend, "--out", str(out), "--skip_node_check"]
        assert main(arguments) == 0
        runs[backend] = {**json.loads(out.read_text()), "ranks": int(ranks)}
    return runs[backend]


def test_the_job_is_described_as_in_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry_run", "--skip_node_check", "--critic_num_gpus_per_node", "2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    kinds = {name: (role["kind"], role["nnodes"], role["nproc_per_node"]) for name, role in plan["roles"].items()}
    assert kinds == {
        "TRAINER": ("run", 1, 1),
        "ACTOR": ("train", 1, 1),
        "CRITIC": ("train", 1, 2),
        "ROLLOUT": ("run", 1, 2),
        "REFERENCE": ("train", 1, 1),
        "REWARD": ("train", 1, 1),
    }
    assert plan["roles"]["CRITIC"]["resource"]["accelerator"] == 0.4
    assert plan["roles"]["ACTOR"]["entrypoint"] == "openrlhf_ppo.ppo_actor:PolicyModelActor"
    assert main(["--dry_run", "--init_kl_coef", "0"]) == 0
    assert "REFERENCE" not in json.loads(capsys.readouterr().out)["roles"]


def test_all_roles_are_initialised_at_the_same_time(report: dict[str, Any]) -> None:
    assert report["inits"] == [["ref"], ["rm"], ["critic"], ["actor"] * report["ranks"]]


def test_batches_are_split_and_come_back_in_order(report: dict[str, Any]) -> None:
    assert report["sequences"] == [[1, 1], [2, 3, 2, 3], [4, 4]]
    assert report["rewards"] == [2.0, 10.0, 8.0]
    assert report["log_probs"] == [-4.0, -2.0]
    assert (report["values"], report["ref"]) == (0.5, [-4.0, -8.0, -4.0])


def test_a_step_updates_weights_and_writes_checkpoints(report: dict[str, Any]) -> None:
    assert report["update"] == {"loss": 40.5}
    assert report["critic_updates"] == [6]
    assert report["versions"] == [6, 6]
    assert report["saved"] == [["step0", "step1"]] * report["ranks"]


def test_rpc_functions_of_the_top_level_are_exported(report: dict[str, Any]) -> None:
    assert report["top_level"] == ["an engine", "an engine"]
    assert report["imported"] == "1"
    assert report["anywhere"] == "made elsewhere"


def test_a_future_sequence_blocks_only_for_the_requested_item() -> None:
    from collections.abc import Sequence

    assert issubclass(core.FutureSequence, Sequence)
    assert issubclass(core.FutureSequence, core.Future)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("PrimeMaster", ["submit(name)"]),
        ("ElasticWorkloadDesc", ["role(name)", "train('package.module:Class')"]),
        ("SimpleWorkloadDesc", ["role(name)", "run('package.module:Class')"]),
    ],
)
def test_replaced_parts_of_the_submitter_raise_an_error_with_their_replacement(name: str, facts: list[str]) -> None:
    with pytest.raises(ImportError, match=says("core", name, *facts)):
        getattr(core, name)


def test_renamed_descriptions_raise_an_error_with_the_new_name() -> None:
    from core import DLConfig, ResourceDesc  # pyright: ignore[reportAttributeAccessIssue]

    assert (DLConfig, ResourceDesc) == (core.Job, core.Resource)
    assert ResourceDesc(cpu=2, accelerator=0.5).accelerator == 0.5


def test_the_state_of_a_job_is_served_over_http(tmp_path: Path) -> None:
    state = RunState("guide", {"TRAINER": 1, "CRITIC": 1})
    endpoint = MetricsEndpoint(state, "127.0.0.1", 0)
    builder = core.JobBuilder().device_type("CPU").config({"calls": 2, "out": str(tmp_path)})
    builder.role("trainer").run("verl_roles.Waiting")
    builder.role("critic").run("verl_roles.Endless")
    assert builder.build().submit("guide", backend="local", observers=[state]).exit_code == 0
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{endpoint.url}/state") as response:
        served = json.load(response)
    endpoint.close()
    assert served["status"] == "finished"
    assert served["roles"]["CRITIC"] == {"workers": 1, "calls": [], "lost": 0}


def test_each_row_of_the_guide_names_a_test_of_this_file() -> None:
    check_rows(Path(__file__))
