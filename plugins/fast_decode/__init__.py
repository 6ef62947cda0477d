"""Faster attention and cache for the hf rollout engine, which loads them where this plug-in is there."""

PROVIDES = {"decoding": {"fast": "decoding:FastDecoding"}}
