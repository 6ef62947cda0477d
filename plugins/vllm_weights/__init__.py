"""Weight updates of a vLLM engine: the receiver in its worker processes, and the tensor layout of its loader.

The plug-in vllm loads it for every model.
"""

PROVIDES = {
    "vllm receiver": {"weights": "worker:WeightReceiver"},
    "vllm families": {"weights": "families:sync_fault"},
}
