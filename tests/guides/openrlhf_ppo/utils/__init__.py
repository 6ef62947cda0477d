"""Helpers of the trainer."""
