"""Reward models: one trainer, and the ranks of one model that learns from pairs of responses."""
