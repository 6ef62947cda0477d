"""A run of which any process is killed or stopped at any moment gives the results of an undisturbed run."""

import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from recipe_runs import Run, RunFolder

GUESSES = """data.path=task:guess evaluation.path=task:guess agent.func_path=env:guess prompts_per_step=4
    samples_per_prompt=4 train.mini_batch_size=16"""
COMMON = """evaluation.every=2 evaluation.max_samples=8 checkpoint.every=2 train.learning_rate=1e-3"""
SORT = """data.path=task:sort rollout.max_new_tokens=8 evaluation.path=task:sort prompts_per_step=8 samples_per_prompt=4
    train.mini_batch_size=16"""
CASES = {
    "grpo ahead of training": f"""{SORT} {COMMON} max_steps=8 asynchronous.enabled=true placement.colocate=false
        algorithm.kl_coef=0.1""",
    "multi_turn": f"{GUESSES} {COMMON} max_steps=8",
    "openrlhf_ppo": """prompt_data=task:sort eval_dataset=task:sort reward.heldout_source=sort evaluation.max_samples=8
        eval_steps=2 max_samples=64 rollout_batch_size=8 n_samples_per_prompt=4 train_batch_size=16 generate_max_len=8
        actor_learning_rate=3e-4 critic_learning_rate=1e-3 init_kl_coef=0.1 save_steps=2 save_value_network=true""",
    "verl_ppo": """data.train_files=task:sort data.val_files=task:sort data.val_max_samples=8 data.train_max_samples=64
        data.train_batch_size=8 data.max_prompt_length=16 data.max_response_length=8 actor_rollout_ref.rollout.n=4
        actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.use_dynamic_bsz=true
        actor_rollout_ref.actor.optim.lr=1e-3 critic.optim.lr=1e-3 trainer.total_epochs=1 trainer.save_freq=2
        trainer.test_freq=2 actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.hybrid_engine=false""",
}
MODEL = {"openrlhf_ppo": "pretrain", "verl_ppo": "actor_rollout_ref.model.path"}


STALL_S = 120
"""Seconds after which a stopped process is ended. The longest activity here without progress is importing."""
INSTANCES = {
    "grpo ahead of training": ["actor-0", "reference-0", "rollout-0", "trainer-0"],
    "multi_turn": ["actor-0", "rollout-0", "trainer-0"],
    "openrlhf_ppo": ["actor-0", "critic-0", "reference-0", "reward-0", "rollout-0", "trainer-0"],
    "verl_ppo": ["actor-0", "critic-0", "ref-0", "rollout-0", "trainer-0"],
}


@dataclass
class Moment:
    """Moments at which a process is killed."""

    name: str
    has_come: Callable[[Run], object]


MOMENTS = [
    Moment("at set-up", lambda run: True),
    Moment("between two checkpoints", lambda run: len(run.metrics) >= 3),
    Moment("while a checkpoint is written", lambda run: list((run.run_dir / "checkpoints").glob(".step_*"))),
]


@pytest.fixture(scope="module")
def started(
    ray_address: str, policy: Path, runner: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Run]:
    """Starts the run of a case."""

    def start(case: str) -> Run:
        recipe = case.split(maxsplit=1)[0]
        model = runner if recipe == "multi_turn" else policy
        options = [f"{MODEL.get(recipe, 'model.path')}={model}", *CASES[case].split(), f"stall_timeout={STALL_S}"]
        return Run(recipe, ray_address, tmp_path_factory.mktemp(recipe) / "run", *options)

    return start


@pytest.fixture(scope="module")
def untouched(started: Callable[[str], Run]) -> Callable[[str], Run]:
    """The undisturbed run of a case, which runs once."""

    @functools.cache
    def run(case: str) -> Run:
        finished = started(case).wait()
        assert finished.code == 0, finished.err
        assert sorted(finished.pids()) == INSTANCES[case]
        return finished

    return run


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "instance", "stopped_at"),
    [(case, name, place % len(MOMENTS)) for case, names in INSTANCES.items() for place, name in enumerate(names)],
)
def test_a_process_stopped_once_and_killed_twice_does_not_change_results(
    case: str, instance: str, stopped_at: int, started: Callable[[str], Run], untouched: Callable[[str], Run]
) -> None:
    expected, run = untouched(case), started(case)
    for place, moment in enumerate(MOMENTS):
        strike(run, instance, moment, signal.SIGSTOP if place == stopped_at else signal.SIGKILL)
    run.wait()
    assert run.code == 0, run.err
    # Asynchronous rollouts of a new engine may use newer weights than those of the lost one.
    if not (case.startswith("grpo") and instance == "rollout-0"):
        same(run, expected)
    assert run.left_behind() == []


def strike(run: Run, instance: str, moment: Moment, how: signal.Signals) -> None:
    """Kill or stop a process at a moment, and wait until it is started again."""
    run.wait_until(lambda: moment.has_come(run) and instance in run.pids())
    pid, began = run.pids()[instance], time.monotonic()
    os.kill(pid, how)
    run.wait_until(lambda: run.pids()[instance] != pid)
    print(instance, how.name, moment.name, f"started again after {time.monotonic() - began:.0f} s", flush=True)


def same(one: RunFolder, other: RunFolder) -> None:
    assert one.learnt() == other.learnt()
    ours, theirs = one.weights(), other.weights()
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in ours.items() if not tensor.equal(theirs[name])] == []
