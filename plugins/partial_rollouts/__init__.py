"""Partial rollouts: engines receive new weights while they generate, and slow prompts are used in a later step.

`asynchronous.partial_rollout=true` loads it.
"""

PROVIDES = {
    "rollout strategy": {"partial_rollouts": "strategy:PartialRollouts"},
    "rollout strategy check": {"partial_rollouts": "options:faults"},
}
