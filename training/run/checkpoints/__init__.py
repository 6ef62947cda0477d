"""Whole checkpoints of a run."""
