"""Routing replay: the training pass sends each token to the experts that it was sent to before.

`rollout.routing_replay` set to `policy` or `engine` loads it.
"""

PROVIDES = {
    "routing replay": dict.fromkeys(("policy", "engine"), "replay:RoutingReplay"),
    "engine routes": {"vllm": "engine_routes:RouteReader"},
    "routing replay plan": {"memory": "plan:with_routes"},
    "routing replay check": {"options": "check:faults", "engine": "check:engine_fault"},
}
