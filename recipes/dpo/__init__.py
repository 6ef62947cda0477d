"""Direct preference optimisation: one trainer, and the ranks of the policy that learns from pairs of responses."""
