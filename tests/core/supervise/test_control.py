"""The side channel between a process and its master."""

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


def test_lines_said_before_the_master_connects_are_kept_for_it() -> None:
    server = ControlServer("127.0.0.1", KEY, {"status": lambda: Status("sorting", 5.0, 5.0, 7)})
    server.send("say", "early")
    link = ControlLink(server.address, KEY)
    deadline = time.monotonic() + PATIENCE_S
    lines: list[tuple[str, str]] = []
    while len(lines) < 1 and time.monotonic() < deadline:
        lines += link.poll()
        time.sleep(0.01)
    server.send("say", "late")
    while len(lines) < 2 and time.monotonic() < deadline:
        lines += link.poll()
        time.sleep(0.01)
    assert lines == [("say", "early"), ("say", "late")]


def test_a_stranger_at_the_port_is_turned_away_and_the_master_still_gets_in() -> None:
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


def test_strangers_who_say_nothing_or_half_keep_nobody_waiting_and_are_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("core.supervise.control._GREETING_S", 1)
    server = ControlServer("127.0.0.1", KEY, {"status": lambda: Status("sorting", 5.0, 5.0, 7)})
    strangers = [socket.create_connection(server.address, timeout=PATIENCE_S) for _ in range(40)]
    for stranger in strangers[::2]:
        stranger.sendall(b"\0\0")
    cut_off = strangers.pop()
    while cut_off.recv(1000):  # the challenge, then the end
        pass
    link = ControlLink(server.address, KEY)
    link.send("status")
    deadline = time.monotonic() + PATIENCE_S
    while link.status.doing != "sorting" and time.monotonic() < deadline:
        link.poll()
    assert link.status == Status("sorting", 5.0, 5.0, 7)
    for stranger in [*strangers, cut_off]:
        stranger.close()


def test_a_process_that_shows_no_key_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.supervise.control._GREETING_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(OSError):
        ControlLink(silent.getsockname(), KEY)


def test_a_killed_process_is_noticed() -> None:
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


def test_memory_counts_children_once_and_the_dead_not_at_all() -> None:
    # In a process of its own: forking this one, which has threads, is not safe.
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
    # Both map the same 64 MiB; added up by resident size they would count twice.
    assert before > 2**26
    assert before - 2**24 < both < before + 2**24
    assert alone < before - 2**24
    assert dead == 0
    assert memory_bytes(2**22 + 1) == 0


def test_reading_memory_takes_a_hundredth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_memory_of_each_role_is_told_and_not_again_at_every_poll(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_who_is_in_one_call_without_progress_is_taken_for_dead_and_a_driver_only_if_nobody_works() -> None:
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
        return {host.plan.name: why for host, why in watch.stalled(limit, [trainer], all_up=True)}

    links["TRAINER-0"].status = Status("TRAINER.run", 900.0, 900.0, 7)
    links["ACTOR-0"].status = Status("ACTOR.double", 700.0, 70.0, 7)
    links["ACTOR-1"].status = Status("ACTOR.double", 700.0, 90.0, 7)
    links["TOOL-0"].status = Status("TOOL.double", 700.0, 80.0, 7)
    assert stalled(95.0) == {}
    links["TOOL-0"].status = Status(STARTING, 700.0, 700.0, 7)
    assert stalled(75.0) == {}  # it waits for others
    links["TOOL-0"].status = Status("TOOL.double", 700.0, 80.0, 7)
    # A rank may wait for another that makes progress; instances do not wait for each other.
    assert stalled(75.0).keys() == {"TOOL-0"}
    found = stalled(60.0)
    assert found.keys() == {"ACTOR-0", "ACTOR-1", "TOOL-0"}
    assert re.search(says("TOOL.double", 700, 80), found["TOOL-0"])
    # Nobody works, and nobody has said anything for a microsecond.
    for name in ("ACTOR-0", "ACTOR-1", "TOOL-0"):
        links[name].status = Status(IDLE, 70.0, 70.0, 7)
    assert stalled(1e-6).keys() == {"TRAINER-0"}
    assert stalled(1000.0) == {}
