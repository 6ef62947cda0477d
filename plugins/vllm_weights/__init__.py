"""Weights of a vLLM engine: the receiver in its worker processes, and the layout that its loader takes.

The plug-in vllm loads it, for every model.
"""

PROVIDES = {
    "vllm receiver": {"weights": "worker:WeightReceiver"},
    "vllm families": {"weights": "families:sync_fault"},
}
