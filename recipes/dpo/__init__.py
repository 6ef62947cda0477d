"""Direct preference optimization: one trainer and the ranks of the policy, which is trained on pairs of responses."""
