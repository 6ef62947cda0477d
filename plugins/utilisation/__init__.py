"""Utilisation of GPUs in training: MFU, tokens per second, and power."""

PROVIDES = {"utilisation": {"gpu": "utilisation:gpu_use"}}
