"""Updates of the reference model towards the policy (TR-DPO)."""

from __future__ import annotations

import shutil
from pathlib import Path

from training.run.policy_calls import PolicyCalls


def sync_reference(calls: PolicyCalls, step: int, share: float) -> None:
    """Interpolate the reference model of a run towards its policy.

    Args:
        calls: calls of the run to its roles.
        step: number of the step.
        share: weight of the policy in the result.
    """
    # A learner that sleeps has no weights on its device to save.
    calls.end_generation()
    folder = Path(calls.config.run_dir, "reference")
    policy = folder / "policy"
    target = folder / f"step_{step}"
    # Left by an attempt that was killed. A mix of old and new files would load without an error.
    for old in (policy, target):
        shutil.rmtree(old, ignore_errors=True)
    calls.save(policy)
    # The new reference is saved, because a replaced worker or a resumed run has to load it, not the initial model.
    calls.trainer.RG_REFERENCE.follow(str(policy), share, str(target))
    calls.load_reference(target)
