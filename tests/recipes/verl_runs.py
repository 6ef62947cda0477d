"""Runs of recipes/verl_ppo for its tests, and helpers that read their results."""

from pathlib import Path

from gates import Gate, source
from recipe_runs import RunFolder

from components.batch import Batch
from components.batch.reading import load_batch

SMALL = """
    data.train_files=task:sort data.val_files=task:sort data.val_max_samples=32 data.train_max_samples=16
    data.train_batch_size=8 data.max_prompt_length=16 data.max_response_length=8
    actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.optim.lr=1e-3 critic.optim.lr=1e-3 actor_rollout_ref.rollout.n=4 trainer.total_epochs=1
"""
"""Two steps of 8 prompts x 4 responses, two optimizer steps each."""
LONG = """
    data.train_max_samples=96 data.train_batch_size=16
    actor_rollout_ref.actor.shuffle=true actor_rollout_ref.actor.optim.lr_scheduler_type=cosine
    algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.horizon=100
    trainer.critic_warmup=1 trainer.save_freq=2 trainer.test_freq=3 trainer.max_actor_ckpt_to_keep=10
"""
"""Six steps of 16 prompts x 8 responses, with all parts of a checkpoint."""
KL = """
    algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.5
    algorithm.kl_ctrl.target_kl=1 algorithm.kl_ctrl.horizon=64
"""
APART = """
    data.train_max_samples=32 trainer.resource_pool_spec={train:[1],sample:[1]}
    trainer.role_mapping={actor:train,critic:train,rollout:sample} trainer.save_freq=1 data.val_files=null
    algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=1.5
"""
"""Four steps with two resource pools: one for training, one for generation."""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    # The share of letters that come later than the one before: a model that has hardly learnt earns some of it.
    while is_shut():
        time.sleep(0.01)
    response, first = solution_str[:5], (extra_info or {}).get("first", "")
    score = sum(a < b for a, b in zip(response, response[1:])) / 4 + bonus
    return {"score": score, "letters": len(response), "extra": float(first == "a")}
"""


def write_files(folder: Path, policy: Path, *gates: Gate) -> list[str]:
    """Return options with the policy, and with a reward function that waits at gates. Its file is written to the
    folder.
    """
    (folder / "reward.py").write_text(source(*gates) + REWARD)
    return [f"actor_rollout_ref.model.path={policy}", f"custom_reward_function.path={folder}/reward.py"]


def batches(run: RunFolder) -> list[Batch]:
    """Return the batch that each step trained on."""
    return [load_batch(file) for file in sorted((run.run_dir / "rollouts").glob("*.parquet"))]


def same(one: RunFolder, other: RunFolder) -> None:
    """Check that two runs have equal scores, metrics and weights, bit by bit."""
    assert one.summary["score"] == other.summary["score"]
    assert one.learnt() == other.learnt()
    ours, theirs = one.weights(), other.weights()
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in ours.items() if not tensor.equal(theirs[name])] == []
