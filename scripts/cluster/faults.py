"""Test the recovery of a job when one of two machines fails, on your own machines.

    python scripts/cluster/faults.py /shared/folder --near 10.0.0.1 --far 10.0.0.2 --ssh 10.0.0.2 \
        --start_ray '/shared/troupe/.venv/bin/ray start --address=10.0.0.1:6379'

Run it on the head of an idle Ray cluster, as the user who started Ray on both machines. --near and --far are the
addresses of the nodes in Ray, and --ssh is the ssh target of far. --start_ray runs there after each failure, and must
join the cluster again. Both machines must see the folder. Only packets of far from and to near are dropped, except ssh,
for at most three minutes. `--cases NAME ...` selects cases of fault_job.py.

It prints a line per case. Exit code: 0 all cases are as expected, 1 some are not, 2 far cannot be reached.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).resolve().parent
sys.path += [path for path in (str(HERE), str(HERE.parents[1])) if path not in sys.path]

from fault_job import CASES  # noqa: E402
from fault_report import Case, Report  # noqa: E402

READY_S = 180.0
LIMIT_S = 180.0
"""Timeout from the fault to the end of the job. By default Ray declares a silent node dead after 65 s."""
GONE_S = 120.0
PAUSE_S = 5.0
LOOK_S = 0.1
KILL = "pids=$(pgrep -f -- '[-]-gcs-address=%s') && kill -KILL $pids $(pgrep -P \"$(echo $pids | tr ' ' ,)\")"
"""Command that kills Ray's processes of a node and their children, the workers."""
DROPPED = (
    "INPUT -s %s -p tcp ! --dport 22 -m comment --comment faults-%s -j DROP",
    "OUTPUT -d %s -p tcp ! --sport 22 -m comment --comment faults-%s -j DROP",
)
DROPPED_S = 180


class Machines(Protocol):
    """Interface for causing faults on a near and a far machine, and for inspecting them."""

    def cut(self) -> None:
        """Stop the far machine without any message to the near one."""

    def kill(self) -> None:
        """Kill Ray and its workers on the far machine."""

    def unplug(self) -> None:
        """Drop all packets between the machines from now on."""

    def plug_in(self) -> None:
        """Stop dropping packets."""

    def left_behind(self, run_id: str, on_far: bool) -> list[str]:
        """Return remaining processes of jobs and the shared-memory folder of the run, with `on_far` also on far."""
        ...

    def drive(self, command: list[str], log: Path) -> subprocess.Popen[Any]:
        """Start a driver on the near machine: Python with these arguments. Its output goes to a file."""
        ...

    def end(self, driver: subprocess.Popen[Any]) -> None:
        """Kill a driver."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of a case, and its differences from the claim."""

    wrong: list[str]
    terminal: str
    report: Report | None = None

    def __str__(self) -> str:
        faults = "; ".join(self.wrong) or "as it is to be"
        return f"{faults} ({self.report.seconds:.0f} s from the fault to the end)" if self.report else faults


def try_case(name: str, folder: Path, machines: Machines, near: str, far: str, limit_s: float = LIMIT_S) -> Verdict:
    """Run the job of a case, cause the fault when it is ready, and compare the outcome with the case.

    A driver that has not ended `limit_s` seconds after the fault is killed.
    """
    case = CASES[name]
    folder.mkdir(parents=True)
    terminal = folder / "terminal.log"
    driver = machines.drive([str(HERE / "fault_job.py"), name, str(folder), near, far], terminal)
    faults: list[str] = []
    try:
        if not _wait_until((folder / "ready").exists, driver, READY_S):
            faults.append(f"not ready after {READY_S:g} s")
        elif driver.poll() is None:
            _strike(case, folder, machines)
            if not _wait_until(lambda: False, driver, limit_s):
                faults.append(f"has not ended {limit_s:g} s after the fault")
    finally:
        if driver.poll() is None:
            machines.end(driver)
    printed = terminal.read_text(encoding="utf-8", errors="replace")
    if not (folder / "report.json").exists():
        return Verdict([*faults, f"no report; exit code {driver.returncode}"], printed)
    report = Report(**json.loads((folder / "report.json").read_text()))
    # Without Ray on far, its left-overs stay until the next run there removes them.
    on_far = case.fault in ("none", "pause", "hang")
    deadline = time.monotonic() + GONE_S
    while (left := machines.left_behind(report.run_id, on_far)) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    if left:
        faults.append(f"left behind: {', '.join(left)}")
    return Verdict([*faults, *report.wrong(case, far, printed)], printed, report)


def _wait_until(reached: Callable[[], bool], driver: subprocess.Popen[Any], seconds: float) -> bool:
    """Wait until something is reached, or the driver has ended; False if it takes too long."""
    deadline = time.monotonic() + seconds
    while not reached() and driver.poll() is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


def _strike(case: Case, folder: Path, machines: Machines) -> None:
    strikes = {"cut": machines.cut, "kill": machines.kill, "pause": machines.unplug}
    strikes.get(case.fault, lambda: None)()  # who hangs does so by itself
    (folder / "struck").touch()
    if case.fault == "pause":
        time.sleep(PAUSE_S)
        machines.plug_in()
        (folder / "healed").touch()


# --- machines that are reached by ssh


@dataclass
class Hosts:
    """This machine, and a machine that is reached by ssh."""

    address: str
    near: str
    ssh: str
    sudo: str
    start_ray: str
    rules: list[str] = field(default_factory=list)
    """Rules of iptables on far. Each has a unique number, so that a late removal spares those of later faults."""

    def on_far(self, script: str, check: bool = True) -> str:
        """Run a script on the far machine and return its output."""
        command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", self.ssh, script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if check and done.returncode:
            raise OSError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def cut(self) -> None:
        self.unplug()
        self.kill()

    def kill(self) -> None:
        self.on_far(KILL % self.address)

    def unplug(self) -> None:
        self.rules = [rule % (self.near, secrets.token_hex(4)) for rule in DROPPED]
        put = " && ".join(f"{self.sudo} iptables -I {rule}" for rule in self.rules)
        # far removes the rules itself, because this machine may be unable to reach it.
        later = shlex.quote(f"sleep {DROPPED_S}; {self._without_rules()}")
        self.on_far(f"{put} && (nohup sh -c {later} >/dev/null 2>&1 &)")

    def plug_in(self) -> None:
        self.on_far(self._without_rules(), check=False)

    def _without_rules(self) -> str:
        return "; ".join(f"{self.sudo} iptables -D {rule}" for rule in self.rules)

    def left_behind(self, run_id: str, on_far: bool) -> list[str]:
        look = f"pgrep -a -f '^ray::(TRAINER|TOOL|ACTOR)'; ls -d /dev/shm/troupe-{run_id}* 2>/dev/null; true"
        output = subprocess.run(["sh", "-c", look], capture_output=True, text=True, check=False).stdout
        if on_far:
            output += self.on_far(look)
        return output.splitlines()

    def drive(self, command: list[str], log: Path) -> subprocess.Popen[Any]:
        with log.open("w") as output:
            env = os.environ | {"RAY_ADDRESS": self.address}
            return subprocess.Popen([sys.executable, *command], env=env, stdout=output, stderr=subprocess.STDOUT)

    def end(self, driver: subprocess.Popen[Any]) -> None:
        driver.kill()
        driver.wait()

    def heal(self, fault: str) -> None:
        """Join far to the cluster again, after near has noticed its failure."""
        if fault in ("cut", "kill"):
            self.plug_in()
            self.on_far(self.start_ray)


def main(arguments: list[str]) -> int:
    """Run the cases. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder that both machines see")
    parser.add_argument("--near", required=True, help="address of this machine's node in Ray")
    parser.add_argument("--far", required=True, help="address in Ray of the node that the fault hits")
    parser.add_argument("--ssh", required=True, help="ssh target of that machine")
    parser.add_argument("--start_ray", required=True, help="command that joins it to the cluster again")
    parser.add_argument("--port", type=int, default=6379, help="port of Ray on the head (default: 6379)")
    parser.add_argument("--sudo", default="sudo -n", help="prefix of iptables on far (default: sudo -n); '' for root")
    two = [name for name, case in CASES.items() if case.machines == 2]
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=two, help="cases to run (default: those for two machines)"
    )
    options = parser.parse_args(arguments)
    hosts = Hosts(f"{options.near}:{options.port}", options.near, options.ssh, options.sudo, options.start_ray)
    all_well = True
    try:
        hosts.on_far("true")
        for name in options.cases:
            folder = options.folder / f"{name}-{time.strftime('%m%d-%H%M%S')}"
            verdict = try_case(name, folder, hosts, options.near, options.far)
            all_well = all_well and not verdict.wrong
            print(f"{'well' if not verdict.wrong else 'WRONG'}: {CASES[name].claim}: {verdict}; {folder}", flush=True)
            hosts.heal(CASES[name].fault)
    except OSError as error:
        print(f"faults: {error}", file=sys.stderr)
        return 2
    return int(not all_well)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
