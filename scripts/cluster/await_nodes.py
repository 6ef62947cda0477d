"""Wait until COUNT nodes have joined the Ray at $RAY_ADDRESS: `await_nodes.py COUNT`. The caller sets a timeout."""

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
    """Wait for the nodes.

    It first waits for the port, because Ray retries a missing head for long and then fails with a page of text.
    """
    count = int(sys.argv[1])
    host, _, port = os.environ["RAY_ADDRESS"].rpartition(":")
    is_up = False
    while not is_up:
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=5):
            is_up = True
        time.sleep(PAUSE_S)
    while True:
        with contextlib.suppress(ConnectionError, RuntimeError):
            ray.init(log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
            if sum(node["Alive"] for node in ray.nodes()) >= count:
                return
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
