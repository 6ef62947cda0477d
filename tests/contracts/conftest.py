"""`pytest tests/contracts --target ...`: options, and the selection of the contracts for each part.

Without --target the contracts run for the shipped scorers and the examples.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.agent_trial import AgentTrial
from tests.contracts.reward_trial import RewardTrial
from tests.contracts.samples import GENERATED, Sample, read_samples
from tests.contracts.targets import EXAMPLES, KINDS, Kind, Target, Unusable, shipped_specs, try_target

HERE = Path(__file__).resolve().parent
KINDS_OF: dict[str, tuple[Kind, ...]] = {
    # Reward functions first, so that both fixtures number them alike and pytest runs the tests of one part together.
    "scoring": ("reward", "scorer"),
    "reward_function": ("reward",),
    "agent": ("agent",),
}
"""Fixture -> kinds of parts that it stands for. A test with such a fixture runs for every part of these kinds."""
DEADLINE_S = 10.0
"""Default timeout of one call in seconds."""
MAX_TURNS = 20
"""Default maximum number of turns of an agent's episode."""
OWN_FILES = ("test_broken_parts.py", "test_targets.py")
"""Tests of the contracts themselves, which do not run for users' parts."""


@dataclass(frozen=True)
class Selection:
    """Parts and settings from the command line."""

    targets: list[Target | Unusable]
    samples: list[Sample]
    has_user_targets: bool
    deadline_s: float
    max_turns: int
    allow_random: bool

    def of(self, fixture: str) -> list[Target]:
        """Return the usable parts that a fixture stands for, by kind."""
        usable = [target for target in self.targets if isinstance(target, Target)]
        return [target for kind in KINDS_OF[fixture] for target in usable if target.kind == kind]


SELECTION = pytest.StashKey[Selection]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, which docs/contracts.md describes."""
    group = parser.getgroup("contracts", "contracts for your own rewards, scorers and agents")
    group.addoption("--target", action="append", metavar="MODULE:NAME|FILE.py[:NAME]|SCORER", help="may be repeated")
    group.addoption("--kind", choices=KINDS, help="kind of the target, if it cannot be inferred from its signature")
    group.addoption("--samples", metavar="FILE", help="rows to try: prompt, label, response or query, actions")
    group.addoption("--deadline", type=float, metavar="SECONDS", help=f"timeout of one call; default: {DEADLINE_S:g}")
    group.addoption("--max-turns", type=int, metavar="N", help=f"maximum turns of an episode; default: {MAX_TURNS}")
    group.addoption("--allow-random", action="store_true", help="allow results that differ between equal calls")


def pytest_configure(config: pytest.Config) -> None:
    """Load the targets."""
    config.addinivalue_line("markers", "repeatable: equal calls give equal results; deselected by --allow-random")
    config.stash[SELECTION] = _selection_of(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise each contract with the parts of its kind."""
    selection = metafunc.config.stash[SELECTION]
    fixture = next((name for name in reversed(KINDS_OF) if name in metafunc.fixturenames), None)
    if fixture is not None:
        targets = selection.of(fixture)
        name = {"reward_function": "scoring"}.get(fixture, fixture)
        metafunc.parametrize(name, targets, ids=[_id(t.spec) for t in targets], indirect=True, scope="module")
    if "any_target" in metafunc.fixturenames:
        metafunc.parametrize("any_target", selection.targets, ids=[_id(target.spec) for target in selection.targets])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove contracts without a part of their kind and waived ones. Users' parts have no other timeout."""
    selection = config.stash[SELECTION]
    contracts = [item for item in items if isinstance(item, pytest.Function) and item.path.parent == HERE]
    # A contract without a part would be reported as skipped.
    empty = {name for name in KINDS_OF if not selection.of(name)}
    removed = [item for item in contracts if empty.intersection(item.fixturenames)]
    if selection.has_user_targets:
        removed += [item for item in contracts if item.path.name in OWN_FILES]
        for item in contracts:
            item.add_marker(pytest.mark.timeout(0))
    waived = [item for item in contracts if selection.allow_random and item.get_closest_marker("repeatable")]
    config.hook.pytest_deselected(items=[item for item in waived if item not in removed])
    items[:] = [item for item in items if item not in removed and item not in waived]


@pytest.fixture(scope="module")
def scoring(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardTrial]:
    """Trial of a reward function or a scorer."""
    selection = request.config.stash[SELECTION]
    trial = RewardTrial(request.param, selection.samples, selection.deadline_s, tmp_path_factory.mktemp("reward"))
    yield trial
    trial.close()


@pytest.fixture
def reward_function(scoring: RewardTrial) -> RewardTrial:
    """Trial of a reward function."""
    return scoring


@pytest.fixture(scope="module")
def agent(request: pytest.FixtureRequest) -> Iterator[AgentTrial]:
    """Trial of an agent."""
    selection = request.config.stash[SELECTION]
    trial = AgentTrial(request.param, selection.samples, selection.deadline_s, selection.max_turns)
    yield trial
    trial.close()


def _selection_of(config: pytest.Config) -> Selection:
    # If tests are collected from the root, this file is loaded after the options were parsed, so they have defaults.
    specs: list[str] | None = config.getoption("target", None)
    if specs:
        # The command `pytest` does not add the current folder to the path. `python -m pytest` does.
        sys.path.insert(0, str(config.invocation_params.dir))
    samples: str | None = config.getoption("samples", None)
    kind: Any = config.getoption("kind", None)
    deadline_s: float | None = config.getoption("deadline", None)
    max_turns: int | None = config.getoption("max_turns", None)
    for name, value in (("--deadline", deadline_s), ("--max-turns", max_turns)):
        if value is not None and not 0 < value < math.inf:
            raise pytest.UsageError(f"{name} {value}: set it to a number above 0")
    try:
        rows = read_samples(Path(samples)) if samples else GENERATED
    except ValueError as error:
        raise pytest.UsageError(f"--samples: {error}") from error
    return Selection(
        targets=[try_target(spec, kind) for spec in specs or shipped_specs()],
        samples=rows,
        has_user_targets=bool(specs),
        deadline_s=deadline_s or DEADLINE_S,
        max_turns=max_turns or MAX_TURNS,
        allow_random=bool(config.getoption("allow_random", None)),
    )


def _id(spec: str) -> str:
    path = Path(spec)
    return path.name if path.is_relative_to(EXAMPLES) else spec
