"""The port at which the ranks of a role will meet."""

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
    sockets = [line.split() for table in tables for line in table]
    port = format(int(sys.argv[1]), "04X")
    print([own[1] for own in sockets if own[1].endswith(":" + port) and own[3] == "0A"])
dist.barrier()
"""


def test_nobody_is_given_a_kept_port_by_chance_and_torch_can_listen_there_at_once() -> None:
    with kept_port() as kept:
        port = kept.getsockname()[1]
        for address in ("127.0.0.1", ""):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((address, port))
        # As torch does it, at all addresses of both protocols; the port is never free on the way.
        with socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True):
            socket.create_connection(("127.0.0.1", port), 60).close()


def test_who_asks_for_any_port_is_not_given_a_kept_one() -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others: list[socket.socket] = []
    with kept_port() as kept:
        port = kept.getsockname()[1]
        assert lowest <= port <= highest
        for _ in range(500):
            others += [socket.create_server(("127.0.0.1", 0))]  # which sets SO_REUSEADDR, too
            assert others[-1].getsockname()[1] != port
    for other in others:
        other.close()


@pytest.mark.full
def test_the_ranks_of_our_engines_meet_at_their_address_alone() -> None:
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
