"""Reward models: one trainer and the ranks of one model, which is trained on pairs of responses."""
