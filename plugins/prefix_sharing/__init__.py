"""Prefix sharing: tokens with which several sequences of a packed row begin are computed once.

Loaded by default for every model that packs (`train.packing`).
"""

PROVIDES = {"row layout": {"shared prompts": "shared_prompts:layout_for"}}
