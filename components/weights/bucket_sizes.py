"""Sizes of the buckets in which weights are gathered and sent. This module does not import torch."""

from __future__ import annotations

BUCKET_BYTES = {"cuda": 256 * 2**20, "cpu": 64 * 2**20}
"""Maximum size of the sharded parameters that are gathered together, in bytes, by device type."""
SENT_BYTES = 128 * 2**20
"""Size of a bucket that engines map or receive, in bytes. A larger weight is sent in slices."""
