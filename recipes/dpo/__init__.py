"""Direct preference optimisation: one trainer, the policy that learns from pairs of answers, and its reference."""
