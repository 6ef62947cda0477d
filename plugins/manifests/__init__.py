"""Manifests that start a planned run on a cluster. `emit` loads it."""

PROVIDES = {"manifest": {"kuberay": "kuberay:manifest", "skypilot": "skypilot:manifest"}}
