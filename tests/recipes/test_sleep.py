"""Engines and learners on shared devices sleep in turn, which does not change the results."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import verl_runs
from local_runs import LocalRun, run_here
from test_resume import PPO
from test_role_group_runs import COMMON

from components.generate.engine import RolloutEngine
from components.generate.hf_engine import HFRolloutEngine
from components.train.engine import TrainEngine
from plugins.resume import engine_state
from tests.messages import says
from training.roles import trained_model

SLEEP = ["placement.engines_sleep=true", "placement.learners_sleep=true"]
OFTEN = ["evaluation.every=1", "checkpoint.every=1", "rollout.verify_weight_sync=true"]
"""After each step greedy responses are checked, held-out ones are scored and a checkpoint is written."""
GRPO = [*COMMON.split(), *OFTEN, "data.max_samples=24", "reward.source=sort"]
OTHERS = {
    "openrlhf_ppo": [*PPO.split(), *OFTEN, "max_samples=24", "algorithm.kl_coef=0.05"],
    "verl_ppo": [
        *verl_runs.SMALL.split(),
        *OFTEN,
        "data.train_max_samples=24",
        "actor_rollout_ref.actor.use_kl_loss=true",
    ],
}


class Calls:
    """Calls of the engines and learners of this process in order, each with the engines that were asleep at
    that time.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.levels: list[int] = []
        # Simulates a GPU in the engine's bookkeeping of its memory.
        patch.setattr(RolloutEngine, "_can_free", staticmethod(lambda: True))
        owners: list[tuple[Any, tuple[str, ...]]] = [
            (TrainEngine, ("sleep", "wake", "train_step", "save_hf")),
            (trained_model, ("save_state",)),
            (engine_state, ("load_state",)),
            (RolloutEngine, ("sleep", "wake", "receive")),
            (HFRolloutEngine, ("_complete",)),
        ]
        for owner, names in owners:
            for name in names:
                patch.setattr(owner, name, self.recorded(owner, name))

    def recorded(self, owner: Any, name: str) -> Callable[..., Any]:
        method = getattr(owner, name)
        role = "learner" if owner in (TrainEngine, trained_model, engine_state) else "engine"

        def call(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self.names.append(f"{role} {name}")
            if self.names[-1] == "engine sleep":
                self.levels.append(*args)
            return method(engine, *args, **kwargs)

        return call

    def generations(self) -> Iterator[list[str]]:
        """Yield the calls between each sleep of the learners and their next wake-up."""
        calls: list[str] | None = None
        for name in self.names:
            if name == "learner sleep":
                calls = []
            elif name == "learner wake" and calls is not None:
                yield calls
                calls = None
            elif calls is not None:
                calls.append(name)


def ended(recipe: str, folder: Path, *options: str) -> LocalRun:
    run = run_here(recipe, folder, *options)
    assert run.code == 0, run.err
    return run


def test_engines_and_learners_sleep_in_turn_without_changing_the_training(policy: Path, tmp_path: Path) -> None:
    arguments = [f"model.path={policy}", *GRPO]
    awake = ended("grpo", tmp_path / "awake", *arguments, "max_steps=2")
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch)
        asleep = ended("grpo", tmp_path / "asleep", *arguments, *SLEEP, "max_steps=2")
        verl_runs.same(awake, asleep)
        # Before the first step the policy is evaluated, sampled and greedy. After each held-out responses are scored,
        # and a checkpoint is written.
        generations = list(calls.generations())
        assert [part.count("engine _complete") for part in generations] == [3, 2, 1, 2]
        assert all(part[-1] == "engine sleep" for part in generations)
        assert not any(name.startswith("learner") for part in generations for name in part)
        # Nothing is published before the end of the first step. From then on weights are dropped during sleep: they are
        # sent with the next version, or requested again.
        assert calls.levels == [1, 1, 2, 2, 2]
        assert calls.names.count("engine receive") == 2 + 1
        resumed = ended("grpo", tmp_path / "asleep", *arguments, *SLEEP)
    assert resumed.summary["resumed_from"] == 2
    verl_runs.same(ended("grpo", tmp_path / "awake", *arguments), resumed)
    for who in ("engines", "actor and critic"):
        assert re.search(says(who, "sleep"), asleep.out)


@pytest.mark.full
@pytest.mark.parametrize("recipe", OTHERS)
def test_a_sleeping_critic_does_not_change_the_training(recipe: str, policy: Path, tmp_path: Path) -> None:
    arguments = [f"model.path={policy}", *OTHERS[recipe]]
    awake = ended(recipe, tmp_path / "awake", *arguments)
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch)
        asleep = ended(recipe, tmp_path / "asleep", *arguments, *SLEEP)
    verl_runs.same(awake, asleep)
    # One actor and one critic at a time, and the engines once more, before anything else is loaded.
    assert calls.names.count("learner sleep") == 2 * (len(calls.levels) - 1)
    assert calls.names.count("learner wake") == 2 * (len(calls.levels) - 1)
    assert 1 < calls.levels.count(1) < calls.levels.count(2)
