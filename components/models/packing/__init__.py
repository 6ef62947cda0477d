"""Sequences end to end in one row."""
