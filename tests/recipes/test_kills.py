"""Whichever process of a run is killed or stopped, and whenever, the run ends as one that nobody touched."""

import os
import signal
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


@dataclass
class Moment:
    """When a process is killed."""

    name: str
    has_come: Callable[[Run], object]


MOMENTS = [
    Moment("at set-up", lambda run: True),
    Moment("between two checkpoints", lambda run: len(run.metrics) >= 3),
    Moment("while a checkpoint is written", lambda run: list((run.run_dir / "checkpoints").glob(".step_*"))),
]


def killed(run: Run, instance: str, moment: Moment, how: signal.Signals) -> None:
    run.wait_until(lambda: moment.has_come(run) and instance in run.pids())
    os.kill(run.pids()[instance], how)


@pytest.mark.nightly
@pytest.mark.parametrize("shift", range(len(MOMENTS)))
@pytest.mark.parametrize("case", CASES)
def test_killed_processes_change_nothing(
    case: str, shift: int, ray_address: str, policy: Path, runner: Path, tmp_path: Path
) -> None:
    recipe = case.split(maxsplit=1)[0]
    model = runner if recipe == "multi_turn" else policy
    options = [f"{MODEL.get(recipe, 'model.path')}={model}", *CASES[case].split()]
    first = Run(recipe, ray_address, tmp_path / "first", *options).wait()
    assert first.code == 0, first.err
    instances = sorted(first.pids())
    assert len(instances) >= 3
    for number, instance in enumerate(instances):
        moment = MOMENTS[(number + shift) % len(MOMENTS)]
        what = f"{case}: {instance} killed {moment.name}"
        run = Run(recipe, ray_address, tmp_path / str(number), *options)
        killed(run, instance, moment, signal.SIGKILL)
        run.wait()
        print(what, run.code, run.summary["seconds"], flush=True)
        assert run.code == 0, f"{what}\n{run.err}"
        # Ahead of training, the rollouts of a new engine may come from newer weights than the lost ones would have.
        if not (case.startswith("grpo") and instance.startswith("rollout")):
            same(run, first)
        assert run.left_behind() == [], what


def same(one: RunFolder, other: RunFolder) -> None:
    assert one.learnt() == other.learnt()
    ours, theirs = one.weights(), other.weights()
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in ours.items() if not tensor.equal(theirs[name])] == []
