"""verl_ppo with another model as reference, and with a reference that is replaced by the policy every few steps."""

from pathlib import Path

import pytest
import torch
from local_runs import LocalRun, run_here
from tiny_models import write_policy
from transformers import AutoModelForCausalLM

from components.batch.reading import load_batch
from recipes.verl_ppo.adapter import plain_arguments

pytestmark = pytest.mark.full

SMALL = """
    data.train_files=task:sort data.train_batch_size=4 data.max_prompt_length=16 data.max_response_length=6
    data.train_max_samples=16 algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4
    actor_rollout_ref.rollout.name=hf trainer.total_epochs=1 actor_rollout_ref.actor.ppo_mini_batch_size=4
    actor_rollout_ref.actor.use_dynamic_bsz=true actor_rollout_ref.actor.use_kl_loss=true
    actor_rollout_ref.actor.kl_loss_coef=0.1 actor_rollout_ref.actor.optim.lr=1e-2 trainer.save_freq=1
    trainer.max_actor_ckpt_to_keep=9
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("models") / "policy")


def options(policy: Path, *more: str) -> list[str]:
    return plain_arguments([*SMALL.split(), f"actor_rollout_ref.model.path={policy}", *more])


def gaps(run: LocalRun) -> list[float]:
    """Return the maximum difference of policy and reference at a token, in nats, of each step."""
    assert run.code == 0, run.err
    steps = [load_batch(file) for file in sorted((run.run_dir / "rollouts").glob("*.parquet"))]
    differences = [
        (step["old_log_prob" if "old_log_prob" in step else "logprob"] - step["reference_logprob"]) for step in steps
    ]
    return [float(d_N[step["action_mask"]].abs().max()) for d_N, step in zip(differences, steps, strict=True)]


def test_the_reference_is_replaced_by_the_policy_every_two_steps_also_after_resume(
    policy: Path, tmp_path: Path
) -> None:
    moving = run_here("verl_ppo", tmp_path / "moving", *options(policy, "trainer.ref_update_freq=2"))
    kl_gaps = gaps(moving)
    assert len(kl_gaps) == 4
    # In the third step the reference equals the policy. In the second and the fourth it is one update behind.
    assert [gap < 1e-5 for gap in kl_gaps] == [True, False, True, False]
    fixed = gaps(run_here("verl_ppo", tmp_path / "fixed", *options(policy, "trainer.ref_update_freq=-1")))
    assert [gap < 1e-5 for gap in fixed] == [True, False, False, False]
    resume = f"resume={moving.run_dir}/checkpoints/step_3"
    rest = run_here("verl_ppo", tmp_path / "rest", *options(policy, "trainer.ref_update_freq=2", resume))
    assert gaps(rest) == kl_gaps[3:]


def test_the_kl_is_computed_against_the_reference_model(policy: Path, tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    write_policy(tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    run = run_here(
        "verl_ppo",
        tmp_path / "run",
        *options(policy, f"actor_rollout_ref.ref.model.path={tmp_path}/other", "trainer.total_training_steps=1"),
    )
    assert gaps(run)[0] > 0.01
    batch = load_batch(run.run_dir / "rollouts" / "step_000001.parquet")
    tokens = batch.row(0, "tokens")
    with torch.no_grad():
        logits = other(tokens[None]).logits[0, :-1].float()
    expected = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    acts = batch.row(0, "action_mask")
    torch.testing.assert_close(batch.row(0, "reference_logprob")[acts], expected[acts[1:]], rtol=0, atol=1e-4)
    # A KL that is not 0 at the start raises no alarm.
    assert '"alarm": "start"' not in (run.run_dir / "events.jsonl").read_text()
