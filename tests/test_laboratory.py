"""Tests of the simulated machines of tests/two_machines.py without Ray: effects of faults, and clean-up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import wait_until_gone
from tests.two_machines import LIMIT_S, ROOT, Laboratory, laboratory

SENDER = """
import socket, time
listener = socket.create_server(("0.0.0.0", 7000))
print("up", flush=True)
connection, _ = listener.accept()
number = 0
while True:
    connection.sendall(b"%d " % number)
    number += 1
    time.sleep(0.05)
"""
RECEIVER = """
import socket
connection = socket.create_connection(("10.77.0.2", 7000))
while data := connection.recv(100):
    print(data.decode(), end="", flush=True)
print("end", flush=True)
"""
OWNER = """
import sys, time
from tests.two_machines import laboratory
with laboratory(2, has_ray=False) as lab:
    print(lab.folder, *[machine.first for machine in lab.machines], lab.switch.pid, flush=True)
    time.sleep(1000)
"""
HEARD_S = 3.0


class Talk:
    """A process on far that sends numbers to one on near."""

    def __init__(self, lab: Laboratory, log: Path) -> None:
        env = {"PATH": os.environ["PATH"]}
        sender = lab.far.within([sys.executable, "-c", SENDER], env)
        self.log = log
        self.sender = subprocess.Popen(sender, stdout=subprocess.PIPE)
        assert self.sender.stdout is not None
        assert self.sender.stdout.readline() == b"up\n"
        with log.open("w") as output:
            receiver = lab.near.within([sys.executable, "-c", RECEIVER], env)
            self.receiver = subprocess.Popen(receiver, stdout=output, stderr=subprocess.STDOUT)
        self.hear()

    def hear(self) -> None:
        """Wait until more data has arrived."""
        before = self.log.read_text()
        deadline = time.monotonic() + LIMIT_S
        while self.log.read_text() == before:
            assert time.monotonic() < deadline, f"nothing arrives; the last was {before[-100:]!r}"
            time.sleep(0.05)

    def close(self) -> None:
        for process in (self.sender, self.receiver):
            process.kill()
            process.wait(LIMIT_S)
        assert self.sender.stdout is not None
        self.sender.stdout.close()


@pytest.fixture(scope="module")
def lab() -> Iterator[Laboratory]:
    with laboratory(2, has_ray=False) as made:
        yield made


@pytest.fixture
def talk(lab: Laboratory, tmp_path: Path) -> Iterator[Talk]:
    lab.heal()
    talk = Talk(lab, tmp_path / "heard")
    yield talk
    lab.kill(lab.near)
    talk.close()


@pytest.mark.full
@pytest.mark.namespaces
def test_a_power_cut_ends_all_processes_and_no_connection(lab: Laboratory, talk: Talk) -> None:
    lab.cut(lab.far)
    talk.sender.wait(LIMIT_S)
    heard = talk.log.read_text()
    time.sleep(HEARD_S)  # the end of the connection or an error would be noticed at once
    assert talk.log.read_text() == heard
    assert talk.receiver.poll() is None


@pytest.mark.full
@pytest.mark.namespaces
def test_a_kill_ends_all_processes_and_their_connections(lab: Laboratory, talk: Talk) -> None:
    lab.kill(lab.far)
    talk.receiver.wait(LIMIT_S)
    assert lab.far.is_on
    assert lab.far.processes() == {}
    assert talk.log.read_text().endswith(("end\n", "Connection reset by peer\n"))


@pytest.mark.full
@pytest.mark.namespaces
def test_a_paused_network_loses_no_data(lab: Laboratory, talk: Talk) -> None:
    lab.unplug(lab.far)
    time.sleep(0.2)  # data in transit arrives
    before = talk.log.read_text()
    time.sleep(1.0)
    assert talk.log.read_text() == before
    lab.plug_in(lab.far)
    talk.hear()
    numbers = talk.log.read_text().split()
    # The last number may be incomplete.
    assert numbers[:-1] == [str(number) for number in range(len(numbers) - 1)]


@pytest.mark.full
@pytest.mark.namespaces
def test_each_machine_has_its_own_name_and_shared_memory(lab: Laboratory) -> None:
    lab.heal()
    code = "import os, socket; print(socket.gethostname(), os.listdir('/dev/shm')); open('/dev/shm/mine', 'w')"
    for machine in lab.machines:
        command = machine.within([sys.executable, "-c", code], {"PATH": os.environ["PATH"]})
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.stdout == f"{machine.name} []\n", done.stderr


@pytest.mark.full
@pytest.mark.namespaces
def test_no_process_of_the_machines_outlives_a_killed_owner(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        folder, *pids = owner.stdout.readline().decode().split()
        assert len(pids) == 3
        owner.kill()
    wait_until_gone(*map(int, pids), timeout_s=LIMIT_S)
    shutil.rmtree(folder)


def test_without_namespaces_the_tests_of_machines_are_deselected_and_the_reason_is_printed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "full", "--collect-only"]
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "core" / "test_two_machines.py")],
        cwd=ROOT,
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    for fact in (" deselected", "left out", "unshare", "util-linux"):
        assert fact in done.stdout
