"""Copies of micro-batches to a GPU while the one before is computed. Loaded by passes on a GPU."""

PROVIDES = {"micro-batch feed": {"cuda": "feed:feed"}}
