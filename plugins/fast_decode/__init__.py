"""Faster attention and cache for the hf rollout engine, which uses them if the folder exists."""

PROVIDES = {"decoding": {"fast": "decoding:FastDecoding"}}
