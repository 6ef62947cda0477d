"""Carrier of weights from each rank to the engine on its device. `rollout.weight_sync=ipc` or `auto` loads it."""

PROVIDES = {"weight carrier": {"ipc": "carrier:IPCCarrier"}, "carrier choice": {"ipc": "choice:IPCChoice"}}
