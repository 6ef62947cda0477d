"""Attention over packed rows with torch's variable-length kernel. Loaded by packed passes on a GPU."""

PROVIDES = {"packed attention": {"cuda": "attention:VARIABLE_LENGTH"}}
