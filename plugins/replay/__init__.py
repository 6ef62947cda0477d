"""Replay of training steps from a checkpoint and stored rollouts, and comparison of two runs.

`rollout.replay_from` loads the strategy. The digests of the weights are recorded in every run.
"""

PROVIDES = {
    "rollout strategy": {"stored_rollouts": "stored:StoredRollouts"},
    "weights record": {"digest": "digests:record"},
}
