"""A replayed step is bit-equal. With a changed option, the replay shows the effects."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from local_runs import run_here

from components.batch.reading import load_batch
from plugins.replay.command import main

ON_POLICY = """model.path={policy} data.path=task:sort max_steps=4 prompts_per_step=4 samples_per_prompt=2
    rollout.max_new_tokens=6 train.learning_rate=1e-3 checkpoint.every=2"""
OPTIONS = {
    "grpo": ON_POLICY + " train.mini_batch_size=4 train.epochs=2",
    "reinforce_pp": ON_POLICY + " algorithm.kl_coef=0.1",
    "multi_turn": """model.path={runner} data.path=task:guess agent.func_path=env:guess max_steps=4 prompts_per_step=4
        samples_per_prompt=2 rollout.max_new_tokens=4 train.learning_rate=1e-3 checkpoint.every=2""",
    "openrlhf_ppo": """pretrain={policy} prompt_data=task:sort max_samples=16 rollout_batch_size=4
        n_samples_per_prompt=2 train_batch_size=4 generate_max_len=6
        actor_learning_rate=1e-3 critic_learning_rate=1e-3 save_steps=2""",
    "verl_ppo": """actor_rollout_ref.model.path={policy} data.train_files=task:sort data.train_batch_size=4
        actor_rollout_ref.rollout.n=2 data.max_response_length=6 actor_rollout_ref.actor.ppo_mini_batch_size=2
        actor_rollout_ref.actor.use_dynamic_bsz=true actor_rollout_ref.actor.optim.lr=1e-3 trainer.save_freq=2
        trainer.total_training_steps=4 algorithm.rollout_correction.rollout_is=token""",
    "dpo": """model.path={policy} data.path=task:sort data.max_samples=40 evaluation.held_out=8 data.max_tokens=16
        train.batch_size=8 checkpoint.every=2""",
    "reward_model": """model.path={policy} data.path=task:sort data.max_samples=40 evaluation.held_out=8
        data.max_tokens=16 train.batch_size=8 checkpoint.every=2""",
    "sft": """model.path=new:sort data.path=task:sort data.max_samples=40 evaluation.held_out=8 train.batch_size=8
        checkpoint.every=2""",
}


@pytest.fixture(scope="module")
def record(policy: Path, runner: Path) -> Callable[[str, Path], Path]:
    """Return a function that runs four steps of a recipe in a folder, with checkpoints after the second and fourth."""

    def run_steps(recipe: str, folder: Path) -> Path:
        options = [option.format(policy=policy, runner=runner) for option in OPTIONS[recipe].split()]
        run = run_here(recipe, folder, *options)
        assert run.code == 0, run.err
        return folder

    return run_steps


@pytest.fixture(scope="module")
def grpo_run(record: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run of grpo."""
    return record("grpo", tmp_path_factory.mktemp("replay") / "run")


@pytest.mark.full
def test_a_step_after_a_checkpoint_is_equal_to_the_bit(grpo_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(grpo_run), "--step", "4"]) == 0, capsys.readouterr()
    out = capsys.readouterr().out
    assert "from the checkpoint" in out
    assert "step_2" in out
    assert "step 4 is equal to the bit, as are the 1 repeated steps before it" in out


@pytest.mark.nightly
def test_a_step_before_the_first_checkpoint_starts_from_the_initial_model_and_generates_the_same(
    grpo_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(grpo_run), "--step", "2", "--regenerate"]) == 0, capsys.readouterr()
    out = capsys.readouterr().out
    assert "from the initial model" in out
    assert "step 2 is equal to the bit, as are the 1 repeated steps before it" in out


@pytest.mark.nightly
def test_a_changed_option_shows_the_metrics_that_change(grpo_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(grpo_run), "--step", "3", "--set", "train.learning_rate=0.5"]) == 0, capsys.readouterr()
    assert "actor/learning_rate  0.001 -> 0.5" in " ".join(capsys.readouterr().out.split("\n")).replace("   ", "  ")


@pytest.mark.nightly
def test_a_tampered_reward_is_named(grpo_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = grpo_run / "rollouts" / "step_000003.parquet"
    content = path.read_bytes()
    stored = load_batch(path)
    stored.with_sequences(reward=stored["reward"] + torch.arange(len(stored))).save(path)
    try:
        assert main([str(grpo_run), "--step", "3", "--out", str(tmp_path / "tampered")]) == 1
    finally:
        path.write_bytes(content)
    assert "step 3: advantages differ: shaped_reward of response 1" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", [recipe for recipe in OPTIONS if recipe != "grpo"])
def test_every_recipe_replays_its_steps_to_the_bit(
    recipe: str, record: Callable[[str, Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record(recipe, tmp_path / "run")
    assert main([str(run), "--step", "4"]) == 0, capsys.readouterr()
    assert "step 4 is equal to the bit" in capsys.readouterr().out
