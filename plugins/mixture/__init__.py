"""Rows of several data sources, drawn with a probability for each."""

PROVIDES = {"data mixture": {"probabilities": "interleave:mixer"}}
