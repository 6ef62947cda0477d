"""Wait until so many nodes have joined the Ray at $RAY_ADDRESS: `await_nodes.py COUNT`. Who calls it
limits the time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time

import ray

PAUSE_S = 0.5


def main() -> None:
    """Wait first for the port: Ray tries a head that is not there for long, and gives up with a page of text."""
    wanted = int(sys.argv[1])
    host, _, port = os.environ["RAY_ADDRESS"].rpartition(":")
    is_up = False
    while not is_up:
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=5):
            is_up = True
        time.sleep(PAUSE_S)
    while True:
        with contextlib.suppress(ConnectionError, RuntimeError):
            ray.init(log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
            if sum(node["Alive"] for node in ray.nodes()) >= wanted:
                return
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
