"""The reserved rendezvous port of a role's ranks."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from core.backends.ray_process import kept_port

RANK = """
import sys
import torch.distributed as dist
from components.train.process_group import init_process_group

init_process_group()
if dist.get_rank() == 0:
    tables = [open(f"/proc/net/{name}").readlines()[1:] for name in ("tcp", "tcp6")]
    sockets = [row.split() for table in tables for row in table]
    port = format(int(sys.argv[1]), "04X")
    print([columns[1] for columns in sockets if columns[1].endswith(":" + port) and columns[3] == "0A"])
dist.barrier()
"""


def test_a_reserved_port_cannot_be_bound_without_reuse_and_torch_can_listen_on_it() -> None:
    with kept_port() as kept:
        port = kept.getsockname()[1]
        for address in ("127.0.0.1", ""):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((address, port))
        # Torch listens on all addresses of both protocols. The port is never free in between.
        with socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True):
            socket.create_connection(("127.0.0.1", port), 60).close()


def test_the_system_does_not_assign_a_reserved_port() -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others: list[socket.socket] = []
    with kept_port() as kept:
        port = kept.getsockname()[1]
        assert lowest <= port <= highest
        for _ in range(500):
            others += [socket.create_server(("127.0.0.1", 0))]  # with SO_REUSEADDR, which would allow it
            assert others[-1].getsockname()[1] != port
    for other in others:
        other.close()


@pytest.mark.full
def test_the_rendezvous_of_an_engine_listens_on_the_master_address_only() -> None:
    with kept_port() as kept:
        port = kept.getsockname()[1]
        env = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-c", RANK, str(port)]
        ranks = [
            subprocess.Popen(command, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        shown = [rank.communicate()[0] for rank in ranks]
    assert shown == [f"['0100007F:{port:04X}']\n", ""]
