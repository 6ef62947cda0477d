"""Partial rollouts: weights reach the engines in the middle of responses, and slow prompts come in a later step.

`asynchronous.partial_rollout=true` loads it.
"""

PROVIDES = {"rollout strategy": {"partial_rollouts": "strategy:PartialRollouts"}}
