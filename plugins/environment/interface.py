"""Network interface of a worker: its address for other machines, and its name for gloo and NCCL."""

import os
import socket

import psutil
import ray

from plugins.environment.forwarding import INTERFACE


def node_address() -> str:
    """Return the address of this process for other machines, and let gloo and NCCL use the same interface.

    TROUPE_INTERFACE names the interface. By default it is the one with the address by which Ray reaches this node. gloo
    would otherwise use the address of the host name, which is 127.0.1.1 on many systems.

    Raises:
        ValueError: this machine has no such interface, or the interface has no address.
    """
    ray_address: str = ray.util.get_node_ip_address()
    kinds = (socket.AF_INET, socket.AF_INET6)
    addresses = {
        # IPv4 first. A % marks an address that is valid on its own link only.
        name: [entry.address for entry in sorted(entries) if entry.family in kinds and "%" not in entry.address]
        for name, entries in psutil.net_if_addrs().items()
    }
    name = os.environ.get(INTERFACE) or next((name for name in addresses if ray_address in addresses[name]), "lo")
    if not addresses.get(name):
        raise ValueError(f"interface {name!r} of placement.interface has no address here; interfaces: {addresses}")
    if INTERFACE in os.environ:
        ray_address = addresses[name][0]
    elif name == "lo":
        return ray_address
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without = all interfaces that begin with the name
    return ray_address
