"""A job on two machines, and what becomes of it when one of them dies: real namespaces, one real Ray for all tests."""

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
"""From the fault to the end of the job: on a quiet machine a fifth of it, most of which Ray takes to know of a cut."""


@pytest.fixture(scope="module")
def faults() -> Iterator[ModuleType]:
    """scripts/cluster/faults.py, which tries the same cases on machines of the user's."""
    folder = ROOT / "scripts" / "cluster"
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("faults", folder / "faults.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look for it there
    spec.loader.exec_module(found)
    yield found
    sys.path[:] = before
    for name in ("faults", "fault_job", "fault_report"):
        sys.modules.pop(name, None)


@dataclass
class Struck:
    """The machines of a laboratory, as faults.py strikes them."""

    laboratory: Laboratory
    kill_script: str

    def cut(self) -> None:
        self.laboratory.cut(self.laboratory.far)

    def kill(self) -> None:
        far, script = self.laboratory.far, self.kill_script % self.laboratory.address
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
    """One laboratory for all tests, healed for each; another one after a test that has failed."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened
        self._laboratory: Laboratory | None = None

    @contextmanager
    def lend(self) -> Iterator[Laboratory]:
        """Healed; it is kept if the test says that all is well with it, and with the Ray in it."""
        if self._laboratory is None:
            self._laboratory = self._opened.enter_context(laboratory(3))
        else:
            self._laboratory.heal()
        lent = self._laboratory
        self._laboratory = None
        yield lent
        self._laboratory = lent

    def give_up(self) -> None:
        """End what is in doubt."""
        if self._laboratory is None:
            self._opened.close()


@pytest.fixture(scope="module")
def keeper() -> Iterator[Keeper]:
    with ExitStack() as opened:
        yield Keeper(opened)


@pytest.fixture
def trial(keeper: Keeper, faults: ModuleType, tmp_path: Path) -> Iterator[Trial]:
    """Tries a case of fault_job.py, and fails with what is wrong and what the driver printed last."""

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


def test_what_workers_leave_in_the_shared_memory_of_a_machine_without_the_driver_is_removed(trial: Trial) -> None:
    trial("shared_memory")


def test_five_seconds_without_a_network_end_nobody_and_no_event_is_lost(trial: Trial) -> None:
    trial("pause")


def test_a_machine_that_takes_four_of_eight_instances_along_is_one_incident_of_max_restarts(trial: Trial) -> None:
    trial("kill_half")


def test_instances_whose_machine_loses_its_power_in_a_call_are_replaced_and_asked_again(trial: Trial) -> None:
    trial("cut_in_a_call")


def test_an_answer_that_was_lost_with_its_machine_before_it_was_fetched_is_asked_for_again(trial: Trial) -> None:
    trial("lost_answer")


def test_a_job_whose_ranks_lose_their_machine_starts_again_on_the_other(trial: Trial) -> None:
    trial("cut_rank")


def test_a_job_that_starts_again_before_ray_knows_of_a_death_does_so_on_the_machines_that_are_left(
    trial: Trial,
) -> None:
    trial("cut_spread")


def test_an_instance_whose_machine_loses_its_power_while_it_is_set_up_is_started_again_on_another(trial: Trial) -> None:
    trial("cut_in_setup")


def test_a_job_whose_rank_is_killed_with_its_machine_while_it_is_set_up_starts_again_on_the_other(trial: Trial) -> None:
    trial("kill_rank_in_setup")


def test_a_job_whose_ranks_lose_their_machine_in_a_checkpoint_goes_on_from_the_whole_one_before(trial: Trial) -> None:
    trial("cut_in_a_checkpoint")


def test_a_job_whose_trainer_is_killed_in_a_checkpoint_goes_on_from_the_whole_one_before_it(trial: Trial) -> None:
    trial("kill_trainer_in_a_checkpoint")


def test_instances_that_hang_on_another_machine_are_ended_and_replaced_and_asked_again(trial: Trial) -> None:
    trial("hang")


def test_a_job_whose_rank_hangs_on_another_machine_starts_again(trial: Trial) -> None:
    trial("hang_rank")


def test_a_job_whose_trainer_loses_its_machine_starts_again_on_the_other(trial: Trial) -> None:
    trial("cut_trainer")
