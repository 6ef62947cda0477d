"""Packing of sequences end to end in one row."""
