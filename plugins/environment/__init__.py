"""Environment of the workers on an existing cluster: variables of the user's shell, and the network interface.

`RAY_ADDRESS` or `placement.interface` loads it.
"""

PROVIDES = {
    "job environment": {"workers": "forwarding:prepare"},
    "forwarded variables": {"names": "forwarding:forwarded"},
}
