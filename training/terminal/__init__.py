"""The terminal of a run: a live view, or a line per step."""
