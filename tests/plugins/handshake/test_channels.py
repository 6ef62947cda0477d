"""The handshake of a job on one machine, and the messages about broken channels."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from core import JobBuilder, JobResult
from plugins.handshake import settings
from plugins.handshake.channels import check
from plugins.handshake.ends import fetch, reach, serve
from plugins.handshake.settings import DEFAULT_S, limit_of
from tests.messages import says
from tests.plugins.handshake.job_roles import Settings

ROLES = "tests.plugins.handshake.job_roles"
ROOT = Path(__file__).parents[3]


def placed(**placement: object) -> SimpleNamespace:
    return SimpleNamespace(placement=SimpleNamespace(**placement))


def test_handshake_is_used_with_several_machines_or_gpus_or_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "detect_devices", lambda: 1)
    assert limit_of(placed(nodes=1, handshake_timeout=None)) == 0
    assert limit_of(placed(nodes=2, handshake_timeout=None)) == DEFAULT_S
    assert limit_of(placed(nodes=2, handshake_timeout=0)) == 0
    assert limit_of(placed(nodes=1, handshake_timeout=7)) == 7
    assert limit_of(SimpleNamespace(), is_large=True) == DEFAULT_S
    monkeypatch.setattr(settings, "detect_devices", lambda: 8)
    assert limit_of(placed(nodes=1, handshake_timeout=None)) == DEFAULT_S
    # Without a limit, nothing of the job is looked at.
    check(None, placed(nodes=1, handshake_timeout=0))


def test_a_transfer_reports_why_it_failed() -> None:
    assert fetch(serve("127.0.0.1", 3 * 2**20 + 5, 1, 5), 3 * 2**20 + 5, 5) == ""
    assert fetch(serve("127.0.0.1", 1024, 1, 5), 2048, 5) == "the connection ended after 1,024 of 2,048 bytes"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = silent.getsockname()
        assert fetch(address, 1024, 0.2) == "no response within 0.2 s"
        assert reach(address, 0.2, 0.2) == ""
    assert re.search(says("refused", "0.3 s"), reach(address, 0.2, 0.3))


@pytest.mark.full
def test_a_collective_of_a_rank_that_ends_reports_the_error_of_the_connection() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= {"NBYTES": "1024", "ENDS": "1"}
        command = [sys.executable, "-m", "tests.plugins.handshake.rank", "group", "20"]
        ranks.append(subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, text=True, cwd=ROOT))
    output, _ = ranks[0].communicate(timeout=120)
    ranks[1].communicate(timeout=120)
    assert re.search(says("collectives of ACTOR (all_reduce of 1,024 bytes on cpu)", "ACTOR-0", "onnection"), output)
    assert "sum of ones" not in output


def run(folder: Path, *, stops: bool = False) -> JobResult:
    """Run a job of two ranks and an engine, whose trainer checks the channels."""
    builder = JobBuilder().device_type("CPU").config(Settings(folder, stops))
    builder.role("trainer").run(f"{ROLES}:Trainer").resource(cpu=0.25)
    builder.role("actor").train(f"{ROLES}:Rank").total(2).resource(cpu=0.25)
    builder.role("rollout").run(f"{ROLES}:Engine").resource(cpu=0.25)
    return builder.build().submit("handshake", log_dir=folder / "logs")


@pytest.mark.full
def test_the_handshake_of_a_job_on_one_machine_takes_a_fraction_of_a_second(
    tmp_path: Path, ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path)
    assert (result.status, result.error) == ("finished", "")
    output = capsys.readouterr().out
    assert all(float(path.read_text()) < 10 for path in tmp_path.glob("group-*"))
    (seconds,) = re.findall(r"handshake: 3 processes on 1 machines reach each other \(([\d.]+) s\)", output)
    assert float(seconds) < 2


@pytest.mark.full
def test_a_process_that_does_not_answer_ends_the_job_within_the_limit(tmp_path: Path, ray_cluster: None) -> None:
    result = run(tmp_path, stops=True)
    assert result.status == "failed"
    assert re.search(says("handshake, calls by Ray", "TRAINER-0", "ROLLOUT-0", "within 3 s"), result.error)
    assert float((tmp_path / "seconds").read_text()) < 5
