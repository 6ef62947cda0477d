"""Verification of weights: digests of all tensors at the trainer and in the engines, compared after each sync."""

PROVIDES = {"weight verification": {"digests": "verify:Digests", "compare": "verify:check_received"}}
