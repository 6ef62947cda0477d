"""Shared prompts: tokens that several sequences of a packed row begin with are computed once.

Loaded by default for every model that packs (`train.packing`).
"""

PROVIDES = {"row layout": {"shared prompts": "shared_prompts:layout_for"}}
