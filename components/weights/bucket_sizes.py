"""Sizes of the buckets in which weights are gathered and sent. Nothing here needs torch."""

from __future__ import annotations

BUCKET_BYTES = {"cuda": 256 * 2**20, "cpu": 64 * 2**20}
"""Bytes of partitioned parameters that are gathered at a time, by the kind of device."""
SENT_BYTES = 128 * 2**20
"""Bytes of a bucket that engines map or receive. A larger weight is sent alone."""
