"""Simulated machines of a cluster on one host, each with its own network, host name, processes and shared memory.

A machine is a set of Linux namespaces whose first process waits for the end of its input. When that process ends, for
whatever reason, Linux ends all others of the machine and removes its network and its mounts; so nothing is left behind,
not even when the tests are killed. Disks are the host's, as one that all machines see.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.processes import is_alive

ROOT = Path(__file__).resolve().parents[1]
RAY = Path(sys.executable).with_name("ray")
PORT = 6379
SHARED_MEMORY_MB = 512
OBJECT_STORE_BYTES = 80_000_000
LIMIT_S = 120.0
"""Timeout of a command against a hang. On a busy host it takes a tenth of it."""
HEALTH = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
}
"""Ray declares a silent node dead after about 16 s. By default it takes 65 s. A pause of 5 s fails 2 checks of 4."""
SWITCH = """
set -e
ip link add name switch type bridge
ip link set dev switch up
echo ready
exec cat
"""
MACHINE = """
set -e
mount -t tmpfs -o size="$2"m none /dev/shm
mount --bind "$3" /etc/hosts
mount --bind /dev/null /etc/resolv.conf
hostname "$1"
ip link set dev lo up
# Linux then clears away whoever ends here without a parent.
trap '' CHLD
echo ready
exec cat
"""
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")


def own_user() -> list[str]:
    """Options of unshare with which an unprivileged user can create the other namespaces."""
    return [] if os.geteuid() == 0 else ["--user", "--map-root-user"]


@functools.cache
def namespaces_refused() -> str:
    """Reason why this host cannot create machines, or "" if it can."""
    missing = [program for program in ("unshare", "nsenter", "ip", "hostname") if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not found; install util-linux, iproute2 and hostname"
    pair = "ip link add name one type veth peer name two && ip link add name switch type bridge"
    script = f"mount -t tmpfs none /dev/shm && {pair} && ip link set dev one master switch"
    command = ["unshare", *own_user(), *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-ec", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no namespaces were made within {LIMIT_S:g} s"
    if done.returncode == 0:
        return ""
    reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    return f"namespaces are not allowed ({reason}); run as root, or allow user namespaces without privileges"


def run(command: Sequence[str | Path], timeout_s: float = LIMIT_S) -> str:
    """Run a command and return its output. AssertionError with the output if it failed."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def only_child(pid: int) -> int:
    """Return the child of a process."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def started(command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
    """A process that prints `ready` after its start, and ends when its input ends, at the latest with this process."""
    words = [str(word) for word in command]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    can_be_read, _, _ = select.select([process.stdout], [], [], LIMIT_S)
    first_line = process.stdout.readline() if can_be_read else b""
    if first_line != b"ready\n":
        process.kill()
        raise AssertionError(f"{' '.join(words)} is not ready: {first_line!r}")
    return process


@dataclass
class Machine:
    """A machine."""

    name: str
    ip: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    first: int = 0
    """Process id of the machine's first process on the host."""

    @property
    def is_on(self) -> bool:
        """True while the machine is running."""
        return self.process is not None and is_alive(self.first)

    def within(self, command: Sequence[str | Path], env: Mapping[str, str]) -> list[str]:
        """Return the command that runs another command on this machine, in the folder of its files."""
        user = ["--user", "--preserve-credentials"] if own_user() else []
        enter = ["nsenter", "--target", str(self.first), *user, *NAMESPACES, "--"]
        variables = [f"{name}={value}" for name, value in env.items()]
        return [*enter, "env", "-i", f"--chdir={self.folder}", *variables, *map(str, command)]

    def processes(self) -> dict[int, str]:
        """Return process id (on the host) -> command of all processes except the first one."""
        if not self.is_on:
            return {}
        namespace = Path(f"/proc/{self.first}/ns/pid").readlink()
        processes = {}
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # a process may end between two reads
                pid = int(place.name)
                if pid != self.first and (place / "ns" / "pid").readlink() == namespace and is_alive(pid):
                    processes[pid] = (place / "cmdline").read_text().replace("\0", " ").strip()
        return processes

    def left_behind(self, run_id: str) -> list[str]:
        """Return what remains of jobs: processes, and the folder of this run in shared memory."""
        if not self.is_on:
            return []
        workers = [command for command in self.processes().values() if re.match(r"ray::(TRAINER|TOOL|ACTOR)", command)]
        return workers + [path.name for path in Path(f"/proc/{self.first}/root/dev/shm").glob(f"troupe-{run_id}*")]

    def end(self) -> None:
        """Simulate a power cut: all processes end at once."""
        if self.process is None:
            return
        if self.process.poll() is None:
            # Its parent ends after it, and it ends after all others.
            os.kill(self.first, signal.SIGKILL)
        self.process.wait(LIMIT_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process = None


@dataclass
class Laboratory:
    """A network switch with its machines. The first one is Ray's head, on which drivers run."""

    folder: Path
    env: dict[str, str]
    machines: list[Machine]
    switch: subprocess.Popen[bytes]
    has_ray: bool
    drivers: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def near(self) -> Machine:
        """The head node."""
        return self.machines[0]

    @property
    def far(self) -> Machine:
        """The second machine."""
        return self.machines[1]

    @property
    def address(self) -> str:
        """Address of Ray."""
        return f"{self.near.ip}:{PORT}"

    # --- faults

    def cut(self, machine: Machine) -> None:
        """Cut the power of a machine: the others get no message, not even the end of a connection."""
        self.unplug(machine)
        machine.end()

    def kill(self, machine: Machine) -> None:
        """Kill Ray's node and all other processes of a machine that keeps running: Linux closes their connections."""
        deadline = time.monotonic() + LIMIT_S
        while pids := machine.processes():
            assert time.monotonic() < deadline, f"{machine.name} has still {pids}"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def pause(self, machine: Machine, seconds: float) -> None:
        """Lose all packets from and to a machine for a while."""
        self.unplug(machine)
        time.sleep(seconds)
        self.plug_in(machine)

    def unplug(self, machine: Machine) -> None:
        """Lose all packets from and to a machine from now on, without an error of any network card."""
        self._at_switch("ip", "link", "set", "dev", machine.name, "nomaster")

    def plug_in(self, machine: Machine) -> None:
        """Deliver the machine's packets again."""
        self._at_switch("ip", "link", "set", "dev", machine.name, "master", "switch")

    def heal(self) -> None:
        """Start machines after a power cut, and Ray where it was killed."""
        for machine in self.machines:
            if not machine.is_on:
                self._switch_on(machine)
                self._start_ray(machine)
            elif self.has_ray and not any("raylet/raylet" in each for each in machine.processes().values()):
                self.kill(machine)
                self._start_ray(machine)

    # --- life

    def start(self) -> None:
        """Start all machines, and a Ray cluster on them."""
        for machine in self.machines:
            self._switch_on(machine)
        for machine in self.machines:
            self._start_ray(machine)

    def close(self) -> None:
        """End everything."""
        for machine in self.machines:
            machine.end()
        for driver in self.drivers:
            driver.kill()
            driver.wait(LIMIT_S)
        self.switch.kill()
        self.switch.wait(LIMIT_S)
        for stream in (self.switch.stdin, self.switch.stdout):
            assert stream is not None
            stream.close()

    def drive(self, *arguments: str | Path, log: Path) -> subprocess.Popen[str]:
        """Start a driver on the head: Python with these arguments. Its output goes to a file."""
        # Prints the stack if the driver is ended because it hangs.
        env = self.env | {"RAY_ADDRESS": self.address, "PYTHONFAULTHANDLER": "1"}
        with log.open("w") as output:
            process = subprocess.Popen(
                self.near.within([sys.executable, *arguments], env),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        self.drivers.append(process)
        return process

    def end_driver(self, driver: subprocess.Popen[str]) -> None:
        """Kill a driver, which prints its stack."""
        for number in (signal.SIGABRT, signal.SIGKILL):
            with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
                os.kill(only_child(driver.pid), number)
                driver.wait(LIMIT_S / 10)
        driver.wait(LIMIT_S)

    def _at_switch(self, *command: str) -> str:
        user = ["--user", "--preserve-credentials"] if own_user() else []
        return run(["nsenter", "--target", str(self.switch.pid), *user, "--net", "--", *command])

    def _switch_on(self, machine: Machine) -> None:
        user = ["nsenter", "--target", str(self.switch.pid), "--user", "--preserve-credentials", "--"]
        enter = user if own_user() else []
        make = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        arguments = [machine.name, str(SHARED_MEMORY_MB), self.folder / "hosts"]
        machine.process = started([*enter, *make, "sh", "-c", MACHINE, "machine", *arguments])
        machine.first = only_child(machine.process.pid)
        ports = json.loads(self._at_switch("ip", "-json", "link"))
        if machine.name in [port["ifname"] for port in ports]:
            # Linux has not yet removed the network of the previous machine with this name.
            self._at_switch("ip", "link", "delete", "dev", machine.name)
        # The network card keeps its address after a power cut. Otherwise the others would send to the old one for a
        # while.
        card = "02:00:00:00:00:" + machine.ip.rpartition(".")[2].zfill(2)
        end = ["type", "veth", "peer", "name", "eth0", "address", card, "netns", str(machine.first)]
        self._at_switch("ip", "link", "add", "name", machine.name, *end)
        self._at_switch("ip", "link", "set", "dev", machine.name, "master", "switch", "up")
        for words in (
            f"addr add {machine.ip}/24 dev eth0",
            "link set dev eth0 up",
            # The address has no machine. But without a default route a machine cannot determine which of its addresses
            # to use.
            "route add default via 10.77.0.254",
        ):
            run(machine.within(["ip", *words.split()], {"PATH": os.environ["PATH"]}))

    def _start_ray(self, machine: Machine) -> None:
        if not self.has_ray:
            return
        is_head = machine is self.near
        role = ["--head", f"--port={PORT}", "--include-dashboard=false"] if is_head else [f"--address={self.address}"]
        addresses = [f"--node-ip-address={machine.ip}", f"--temp-dir={machine.folder / 'ray'}"]
        size = ["--num-cpus=8", "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats"]
        run(machine.within([RAY, "start", *role, *addresses, *size], self.env))


@contextlib.contextmanager
def laboratory(count: int, env: Mapping[str, str] = HEALTH, has_ray: bool = True) -> Iterator[Laboratory]:
    """Create machines with a Ray cluster that requires its token. `near` and `far` are the first two machines.

    `env` are settings of Ray.
    """
    folder = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))  # the paths of sockets have a maximum length
    names = ["near", "far", *(f"far-{number}" for number in range(3, count + 1))]
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        machines = [Machine(name, f"10.77.0.{number}", folder / name) for number, name in enumerate(names[:count], 1)]
        for machine in machines:
            machine.folder.mkdir()
        lines = ["127.0.0.1 localhost", *(f"{machine.ip} {machine.name}" for machine in machines)]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        (folder / "token").touch(mode=0o600)
        (folder / "token").write_text(secrets.token_hex(32))
        switch = started(["unshare", *own_user(), "--net", "sh", "-c", SWITCH])
        made = Laboratory(folder, _environment(folder, env), machines, switch, has_ray)
        stack.callback(made.close)
        made.start()
        yield made


def _environment(folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Environment of all processes on the machines: this checkout and the token."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_worker_niceness": "0",
        **more,
    }
