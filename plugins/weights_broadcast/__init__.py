"""Carrier of weights from rank 0 to all engines at once. `rollout.weight_sync=broadcast` or `auto` loads it."""

PROVIDES = {
    "weight carrier": {"broadcast": "carrier:BroadcastCarrier"},
    "carrier choice": {"broadcast": "choice:BroadcastChoice"},
}
