"""The control channel between a process and its master."""

import re
import socket
import subprocess
import sys
import time
from multiprocessing import AuthenticationError
from typing import Any

import pytest

from core import MemoryEvent
from core.plan import ProcessPlan
from core.supervise.control import ControlLink, ControlServer, MemoryGauge, Status, memory_bytes
from core.supervise.watch import Watch, WatchedProcess
from core.supervise.worker_process import IDLE, STARTING
from tests.messages import says

KEY = b"k" * 32
PATIENCE_S = 60.0


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_messages_sent_before_the_master_connects_are_queued(ip: str) -> None:
    server = ControlServer(ip, KEY, {"status": lambda: Status("sorting", 5.0, 5.0, 7)})
    server.send("say", "early")
    link = ControlLink(server.address, KEY)
    deadline = time.monotonic() + PATIENCE_S
    messages: list[tuple[str, str]] = []
    while len(messages) < 1 and time.monotonic() < deadline:
        messages += link.poll()
        time.sleep(0.01)
    server.send("say", "late")
    while len(messages) < 2 and time.monotonic() < deadline:
        messages += link.poll()
        time.sleep(0.01)
    assert messages == [("say", "early"), ("say", "late")]


def test_a_client_without_the_key_is_rejected_and_the_master_can_still_connect() -> None:
    server = ControlServer("127.0.0.1", KEY, {"status": lambda: Status("sorting", 5.0, 5.0, 7)})
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(AuthenticationError):
        ControlLink(server.address, b"wrong" * 8)
    link = ControlLink(server.address, KEY)
    link.send("status")
    deadline = time.monotonic() + PATIENCE_S
    while link.status.doing != "sorting" and time.monotonic() < deadline:
        link.poll()
    assert link.status == Status("sorting", 5.0, 5.0, 7)


def test_silent_clients_do_not_block_the_master_and_are_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("core.supervise.control._GREETING_S", 1)
    server = ControlServer("127.0.0.1", KEY, {"status": lambda: Status("sorting", 5.0, 5.0, 7)})
    strangers = [socket.create_connection(server.address, timeout=PATIENCE_S) for _ in range(40)]
    for stranger in strangers[::2]:
        stranger.sendall(b"\0\0")
    disconnected = strangers.pop()
    while disconnected.recv(1000):  # the challenge, then the end of the connection
        pass
    link = ControlLink(server.address, KEY)
    link.send("status")
    deadline = time.monotonic() + PATIENCE_S
    while link.status.doing != "sorting" and time.monotonic() < deadline:
        link.poll()
    assert link.status == Status("sorting", 5.0, 5.0, 7)
    for stranger in [*strangers, disconnected]:
        stranger.close()


def test_a_server_that_does_not_send_the_challenge_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.supervise.control._GREETING_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(OSError):
        ControlLink(silent.getsockname(), KEY)


def test_the_end_of_a_killed_process_is_detected() -> None:
    code = (
        "from core.supervise.control import ControlServer, Status; import sys;"
        "print(ControlServer('127.0.0.1', b'k' * 32, {'status': lambda: Status('', 0.0, 0.0, 0)}).address[1],"
        " flush=True);"
        "sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    link = ControlLink(("127.0.0.1", int(process.stdout.readline())), KEY)
    link.poll()
    assert link.alive
    process.kill()
    deadline = time.monotonic() + PATIENCE_S
    while link.alive and time.monotonic() < deadline:
        link.poll()
    assert not link.alive
    process.wait()


def test_memory_counts_shared_pages_once_and_dead_processes_as_zero() -> None:
    # In a separate process, because forking this one is not safe: it has threads.
    code = """
import os, signal
from core.supervise.control import memory_bytes
held = bytearray(b"x") * 2**26
before = memory_bytes()
child = os.fork()
if child == 0:
    signal.pause()
both, alone = memory_bytes(), memory_bytes(descendants=False)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
print(before, both, alone, memory_bytes(child))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    before, both, alone, dead = map(int, result.stdout.split())
    # Both processes map the same 64 MiB, which resident sizes would count twice.
    assert before > 2**26
    assert before - 2**24 < both < before + 2**24
    assert alone < before - 2**24
    assert dead == 0
    assert memory_bytes(2**22 + 1) == 0


def test_reading_memory_takes_at_most_one_percent_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[float] = []

    def slow(descendants: bool) -> int:
        reads.append(time.monotonic())
        time.sleep(0.05)
        return 7

    monkeypatch.setattr("core.supervise.control.memory_bytes", slow)
    monkeypatch.setattr("core.supervise.control._MEMORY_EVERY_S", 0.0)
    gauge = MemoryGauge()
    began = time.monotonic()
    assert [gauge.read() for _ in range(1000)] == [7] * 1000
    assert len(reads) <= 1 + (time.monotonic() - began) / 5.0


def test_memory_events_have_the_memory_of_each_role_and_are_not_sent_at_every_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("core.supervise.watch._STATUS_EVERY_S", 0.0)
    monkeypatch.setattr("core.supervise.watch._MEMORY_EVERY_S", 1000.0)
    seen: list[Any] = []
    watch = Watch([seen.append], print)
    for workers in ([("ACTOR", 0), ("ROLLOUT", 0)], [("ACTOR", 1), ("ROLLOUT", 1)], [("REWARD", 0)]):
        server = ControlServer("127.0.0.1", KEY, {"status": lambda _: Status("idle", 0.0, 0.0, 7)})
        plan = ProcessPlan(workers=workers, bundle=0, cpu=1, threads=1, accelerator=0, memory=0)
        link = ControlLink(server.address, KEY)
        link.status = Status("idle", 0.0, 0.0, 7)
        watch.processes.append(WatchedProcess(plan, expendable=False, link=link))
    for _ in range(3):
        watch.poll()
    (event,) = seen
    assert isinstance(event, MemoryEvent)
    assert event.bytes.pop("DRIVER") > 10**6
    assert event.bytes == {"ACTOR+ROLLOUT": 14, "REWARD": 7}


def test_a_call_without_progress_counts_as_hung_and_the_driver_only_if_all_others_are_idle() -> None:
    watch = Watch([], print)
    links = dict[str, ControlLink]()
    for name in ("TRAINER-0", "ACTOR-0", "ACTOR-1", "TOOL-0"):
        role, rank = name.split("-")
        server = ControlServer("127.0.0.1", KEY, {})
        plan = ProcessPlan(workers=[(role, int(rank))], bundle=0, cpu=1, threads=1, accelerator=0, memory=0)
        links[name] = ControlLink(server.address, KEY)
        watch.processes.append(WatchedProcess(plan, expendable=role == "TOOL", link=links[name]))
    trainer = watch.processes[0]

    def stalled(limit: float) -> dict[str, str]:
        return {host.plan.name: why for host, why in watch.stalled(limit, [trainer], have_all_started=True)}

    links["TRAINER-0"].status = Status("TRAINER.run", 900.0, 900.0, 7)
    links["ACTOR-0"].status = Status("ACTOR.double", 700.0, 70.0, 7)
    links["ACTOR-1"].status = Status("ACTOR.double", 700.0, 90.0, 7)
    links["TOOL-0"].status = Status("TOOL.double", 700.0, 80.0, 7)
    assert stalled(95.0) == {}
    links["TOOL-0"].status = Status(STARTING, 700.0, 700.0, 7)
    assert stalled(75.0) == {}  # a starting process waits for other processes
    links["TOOL-0"].status = Status("TOOL.double", 700.0, 80.0, 7)
    # A rank may wait for another that makes progress; instances do not wait for each other.
    assert stalled(75.0).keys() == {"TOOL-0"}
    hung = stalled(60.0)
    assert hung.keys() == {"ACTOR-0", "ACTOR-1", "TOOL-0"}
    assert re.search(says("TOOL.double", 700, 80), hung["TOOL-0"])
    # All other processes are idle, and the last message is older than a microsecond.
    for name in ("ACTOR-0", "ACTOR-1", "TOOL-0"):
        links[name].status = Status(IDLE, 70.0, 70.0, 7)
    assert stalled(1e-6).keys() == {"TRAINER-0"}
    assert stalled(1000.0) == {}
