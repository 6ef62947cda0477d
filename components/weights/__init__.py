"""Transfer of weights from the ranks of the policy to the rollout engines."""
