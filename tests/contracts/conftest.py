"""`pytest tests/contracts --target ...`: the options, and which contracts are held for which parts.

Without --target the contracts are held for what comes with the project.
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
    # Reward functions first: so the tests of either fixture number them alike, and pytest keeps those of one together.
    "scoring": ("reward", "scorer"),
    "reward_function": ("reward",),
    "agent": ("agent",),
}
"""Fixtures that stand for one part of these kinds; each test that asks for one is held for every such part."""
DEADLINE_S, MAX_TURNS = 10.0, 20
OWN_FILES = ("test_broken_parts.py", "test_targets.py")
"""About the contracts themselves: not for users' parts."""


@dataclass(frozen=True)
class Asked:
    """What the command line asked for."""

    targets: list[Target | Unusable]
    samples: list[Sample]
    users_own: bool
    deadline_s: float
    max_turns: int
    allow_random: bool

    def of(self, fixture: str) -> list[Target]:
        """List the usable parts that a fixture stands for, by kind."""
        usable = [target for target in self.targets if isinstance(target, Target)]
        return [target for kind in KINDS_OF[fixture] for target in usable if target.kind == kind]


ASKED = pytest.StashKey[Asked]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say what users may set; docs/contracts.md has it too."""
    group = parser.getgroup("contracts", "contracts of your own rewards, scorers and agents")
    group.addoption("--target", action="append", metavar="MODULE:NAME|FILE.py[:NAME]|SCORER", help="may be repeated")
    group.addoption("--kind", choices=KINDS, help="what the target is, where it is not seen from its form")
    group.addoption("--samples", metavar="FILE", help="rows to ask about: prompt, label, response or query, actions")
    group.addoption("--deadline", type=float, metavar="SECONDS", help=f"for one call; {DEADLINE_S:g} if not set")
    group.addoption("--max-turns", type=int, metavar="N", help=f"end of an agent's episode; {MAX_TURNS} if not set")
    group.addoption("--allow-random", action="store_true", help="the same need not get the same again")


def pytest_configure(config: pytest.Config) -> None:
    """Load the targets."""
    config.addinivalue_line("markers", "repeatable: the same gives the same again; left out with --allow-random")
    config.stash[ASKED] = _asked(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Hold each contract for each part of its kind."""
    asked = metafunc.config.stash[ASKED]
    wanted = next((name for name in reversed(KINDS_OF) if name in metafunc.fixturenames), None)
    if wanted is not None:
        name = "scoring" if wanted == "reward_function" else wanted
        targets = asked.of(wanted)
        metafunc.parametrize(name, targets, ids=[_id(t.spec) for t in targets], indirect=True, scope="module")
    if "any_target" in metafunc.fixturenames:
        metafunc.parametrize("any_target", asked.targets, ids=[_id(target.spec) for target in asked.targets])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is of no target's kind, or waived; let users' deadlines be the only ones."""
    asked = config.stash[ASKED]
    ours = [item for item in items if isinstance(item, pytest.Function) and item.path.parent == HERE]
    # Without a part of the kind pytest would show the contract as skipped.
    empty = {name for name in KINDS_OF if not asked.of(name)}
    out = [item for item in ours if empty.intersection(item.fixturenames)]
    if asked.users_own:
        out += [item for item in ours if item.path.name in OWN_FILES]
        for item in ours:
            item.add_marker(pytest.mark.timeout(0))
    waived = [item for item in ours if asked.allow_random and item.get_closest_marker("repeatable")]
    config.hook.pytest_deselected(items=[item for item in waived if item not in out])
    items[:] = [item for item in items if item not in out and item not in waived]


@pytest.fixture(scope="module")
def scoring(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardTrial]:
    """A reward function or a scorer."""
    asked = request.config.stash[ASKED]
    trial = RewardTrial(request.param, asked.samples, asked.deadline_s, tmp_path_factory.mktemp("reward"))
    yield trial
    trial.close()


@pytest.fixture
def reward_function(scoring: RewardTrial) -> RewardTrial:
    """A reward function."""
    return scoring


@pytest.fixture(scope="module")
def agent(request: pytest.FixtureRequest) -> Iterator[AgentTrial]:
    """An agent."""
    asked = request.config.stash[ASKED]
    trial = AgentTrial(request.param, asked.samples, asked.deadline_s, asked.max_turns)
    yield trial
    trial.close()


def _asked(config: pytest.Config) -> Asked:
    # Collected from the root, this file comes too late for its options to be read: they have their defaults then.
    specs: list[str] | None = config.getoption("target", None)
    if specs:
        # The command `pytest` leaves it out, `python -m pytest` has it already.
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
    return Asked(
        targets=[try_target(spec, kind) for spec in specs or shipped_specs()],
        samples=rows,
        users_own=bool(specs),
        deadline_s=deadline_s or DEADLINE_S,
        max_turns=max_turns or MAX_TURNS,
        allow_random=bool(config.getoption("allow_random", None)),
    )


def _id(spec: str) -> str:
    path = Path(spec)
    return path.name if path.is_relative_to(EXAMPLES) else spec
