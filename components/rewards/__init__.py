"""Rewards of responses."""
