"""Address and token of the monitoring endpoint, checked without starting anything."""

from __future__ import annotations

import ipaddress
import os

TOKEN = "TROUPE_METRICS_TOKEN"


def endpoint_token() -> str:
    """Return the token that requests must send, or an empty string."""
    return os.environ.get(TOKEN, "").strip()


def endpoint_fault(host: str) -> str:
    """Return why an endpoint cannot listen at this address, or an empty string."""
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return f"log.metrics_host={host} is not an IP address; set 127.0.0.1, 0.0.0.0 or an address of this machine"
    if is_loopback or endpoint_token():
        return ""
    return (
        f"log.metrics_host={host} lets other machines read the run's metrics; set a token in {TOKEN}, which requests "
        "send as 'Authorization: Bearer ...', or log.metrics_host=127.0.0.1"
    )
