"""Variables of the user's shell that the workers on an existing cluster get."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from core import Job, JobBuilder
from plugins.environment.forwarding import prepare
from tests.messages import says

SHELL = {
    "RAY_ADDRESS": "10.0.0.1:6379",
    "NCCL_DEBUG": "INFO",
    "GLOO_SOCKET_IFNAME": "eth1",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "HF_HOME": "/shared/hf",
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz",
    "https_proxy": "http://proxy:3128",
    "http_proxy": "http://someone:word@proxy:3128",
    "OMP_WAIT_POLICY": "ACTIVE",
    "OMP_NUM_THREADS": "3",
    "HOME": "/home/someone",
    "MY_SETTING": "7",
}

ADDRESS = "plugins.environment.interface:node_address"


def job(**environment: str) -> Job:
    builder = JobBuilder().device_type("CPU").global_env(environment)
    builder.role("solo").run("core.workload:BaseWorkload")
    return builder.build()


def config(interface: str = "") -> SimpleNamespace:
    return SimpleNamespace(placement=SimpleNamespace(interface=interface))


def test_settings_of_libraries_reach_the_workers_and_keys_and_other_variables_do_not() -> None:
    planned = job(NCCL_DEBUG="WARN")
    forwarded, withheld = prepare(planned, config(), SHELL)
    expected = {"GLOO_SOCKET_IFNAME", "PYTORCH_ALLOC_CONF", "VLLM_USE_V2_MODEL_RUNNER", "HF_HOME", "https_proxy"}
    expected |= {"OMP_WAIT_POLICY"}
    settings = {name: SHELL[name] for name in expected} | {"NCCL_DEBUG": "WARN"}
    assert planned.global_env == settings | {"TROUPE_ADDRESS_FROM": ADDRESS}
    assert re.search(says(*sorted(expected)), forwarded)
    assert re.search(says("HF_TOKEN", "http_proxy"), withheld)
    for value in ("hf_abc", "word@", "INFO", "/shared/hf"):
        assert value not in forwarded + withheld


def test_list_of_variables_can_be_extended() -> None:
    planned = job()
    prepare(planned, config(), SHELL | {"TROUPE_FORWARD": "MY_*, OTHER"})
    assert planned.global_env["MY_SETTING"] == "7"


@pytest.mark.parametrize("interface", ["", "eth1"])
def test_own_cluster_inherits_the_shell_and_gets_only_the_interface(interface: str) -> None:
    planned = job()
    shell = {name: value for name, value in SHELL.items() if name != "RAY_ADDRESS"}
    assert prepare(planned, config(interface), shell) == []
    assert planned.global_env == ({"TROUPE_INTERFACE": interface, "TROUPE_ADDRESS_FROM": ADDRESS} if interface else {})
