"""Failures of a machine during a job on two machines: real network namespaces, and one real Ray for all tests."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.two_machines import LIMIT_S, ROOT, Laboratory, laboratory

pytestmark = [pytest.mark.full, pytest.mark.namespaces]

Trial = Callable[[str], None]
WITHIN_S = 120.0
"""Maximum seconds from the fault to the end of the job. On an idle machine it takes a fifth of that, mostly until Ray
detects the cut."""


@pytest.fixture(scope="module")
def faults() -> Iterator[ModuleType]:
    """Import scripts/cluster/faults.py, which runs the same cases on a user's machines."""
    folder = ROOT / "scripts" / "cluster"
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("faults", folder / "faults.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up in sys.modules
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before
    for name in ("faults", "fault_job", "fault_report"):
        sys.modules.pop(name, None)


@dataclass
class Struck:
    """The machines of a laboratory, with the interface that faults.py uses to inject faults."""

    laboratory: Laboratory
    kill_script: str

    def cut(self) -> None:
        self.laboratory.cut(self.laboratory.far)

    def kill(self) -> None:
        far = self.laboratory.far
        script = self.kill_script % self.laboratory.address
        subprocess.run(far.within(["sh", "-c", script], self.laboratory.env), check=True, timeout=LIMIT_S)

    def unplug(self) -> None:
        self.laboratory.unplug(self.laboratory.far)

    def plug_in(self) -> None:
        self.laboratory.plug_in(self.laboratory.far)

    def left_behind(self, run_id: str, on_far: bool) -> list[str]:
        far = self.laboratory.far
        machines = [machine for machine in self.laboratory.machines if on_far or machine is not far]
        return [f"{machine.name}: {left}" for machine in machines for left in machine.left_behind(run_id)]

    def drive(self, command: list[str], log: Path) -> subprocess.Popen[Any]:
        return self.laboratory.drive(*command, log=log)

    def end(self, driver: subprocess.Popen[Any]) -> None:
        self.laboratory.end_driver(driver)


class Keeper:
    """Owner of one laboratory for all tests. It is healed for each test, and replaced after a failed test."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened
        self._laboratory: Laboratory | None = None

    @contextmanager
    def lend(self) -> Iterator[Laboratory]:
        """Yield a healed laboratory. It is reused only if the block ends without an error."""
        if self._laboratory is None:
            self._laboratory = self._opened.enter_context(laboratory(3))
        else:
            self._laboratory.heal()
        lent = self._laboratory
        self._laboratory = None
        yield lent
        self._laboratory = lent

    def give_up(self) -> None:
        """End the laboratory if the last test has failed, because its state is unknown."""
        if self._laboratory is None:
            self._opened.close()


@pytest.fixture(scope="module")
def keeper() -> Iterator[Keeper]:
    with ExitStack() as opened:
        yield Keeper(opened)


@pytest.fixture
def trial(keeper: Keeper, faults: ModuleType, tmp_path: Path) -> Iterator[Trial]:
    """Return a function that runs a case of fault_job.py, and fails with the faults and the driver's last output."""

    def run(name: str) -> None:
        with keeper.lend() as lab:
            struck = Struck(lab, faults.KILL)
            verdict = faults.try_case(name, tmp_path / "run", struck, lab.near.ip, lab.far.ip, WITHIN_S)
            print(verdict, *verdict.terminal.splitlines()[-40:], sep="\n")
            assert verdict.wrong == []

    yield run
    keeper.give_up()


def test_a_job_on_two_machines_finishes_and_leaves_nothing_on_either(trial: Trial) -> None:
    trial("none")


def test_the_shared_memory_of_a_machine_without_the_driver_is_removed(trial: Trial) -> None:
    trial("shared_memory")


def test_five_seconds_without_a_network_kill_no_worker_and_lose_no_event(trial: Trial) -> None:
    trial("pause")


def test_the_loss_of_four_of_eight_instances_with_a_machine_counts_once_in_max_restarts(trial: Trial) -> None:
    trial("kill_half")


def test_instances_whose_machine_loses_power_in_a_call_are_replaced_and_called_again(trial: Trial) -> None:
    trial("cut_in_a_call")


@pytest.mark.nightly
def test_a_call_is_sent_again_if_its_result_was_lost_with_a_machine(trial: Trial) -> None:
    trial("lost_answer")


def test_a_job_restarts_on_the_other_machine_after_its_ranks_lost_theirs(trial: Trial) -> None:
    trial("cut_rank")


@pytest.mark.nightly
def test_a_job_that_restarts_before_ray_has_detected_a_dead_machine_uses_the_remaining_ones(trial: Trial) -> None:
    trial("cut_spread")


@pytest.mark.nightly
def test_an_instance_whose_machine_loses_power_during_setup_is_started_again_on_another(trial: Trial) -> None:
    trial("cut_in_setup")


@pytest.mark.nightly
def test_a_job_whose_rank_dies_with_its_machine_during_setup_restarts_on_the_other(trial: Trial) -> None:
    trial("kill_rank_in_setup")


@pytest.mark.nightly
def test_a_job_whose_ranks_lose_their_machine_in_a_checkpoint_resumes_from_the_one_before(trial: Trial) -> None:
    trial("cut_in_a_checkpoint")


@pytest.mark.nightly
def test_a_job_whose_trainer_is_killed_in_a_checkpoint_resumes_from_the_one_before(trial: Trial) -> None:
    trial("kill_trainer_in_a_checkpoint")


@pytest.mark.nightly
def test_hung_instances_on_another_machine_are_killed_replaced_and_called_again(trial: Trial) -> None:
    trial("hang")


@pytest.mark.nightly
def test_a_job_whose_rank_hangs_on_another_machine_restarts(trial: Trial) -> None:
    trial("hang_rank")


@pytest.mark.nightly
def test_a_job_whose_trainer_loses_its_machine_restarts_on_the_other(trial: Trial) -> None:
    trial("cut_trainer")
