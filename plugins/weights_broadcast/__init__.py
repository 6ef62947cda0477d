"""Carrier of weights from rank 0 to all engines at once: `rollout.weight_sync=broadcast` loads it, or `auto`."""

PROVIDES = {
    "weight carrier": {"broadcast": "carrier:BroadcastCarrier"},
    "carrier choice": {"broadcast": "choice:BroadcastChoice"},
}
