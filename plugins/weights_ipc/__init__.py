"""Carrier of weights from each rank to the engine on its device: `rollout.weight_sync=ipc` loads it, or `auto`."""

PROVIDES = {"weight carrier": {"ipc": "carrier:IPCCarrier"}, "carrier choice": {"ipc": "choice:IPCChoice"}}
