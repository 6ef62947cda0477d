"""Ragged batches: sequences of different lengths laid end to end, with their columns."""

from components.batch.batch import Batch, Layout

__all__ = ["Batch", "Layout"]
