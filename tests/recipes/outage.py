"""A reward server that fails on purpose, in a separate process: `python outage.py PORT FAILS AT`, which `Server`
starts.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar


def held_port() -> socket.socket:
    """A port that is reserved while this is open. Nothing listens on it: without a `Server`, connections are
    refused.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held


class Server:
    """A reward function: the share of the label's letters at their correct positions."""

    def __init__(self, held: socket.socket, fails: str = "never", at: int = 0) -> None:
        """A server at a `held_port`.

        `fails`: it `dies` or `hangs` at request number `at`, and at all later ones. A retry has the number of the first
        attempt.
        """
        self.port = held.getsockname()[1]
        command = [sys.executable, __file__, str(self.port), fails, str(at)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "serves\n"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/get_reward"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def rewards(request: Mapping[str, Sequence[str]]) -> list[float]:
    """Return the reward of each response. A query is a prompt followed by its response."""
    responses = [query[len(prompt) :] for query, prompt in zip(request["query"], request["prompts"], strict=True)]
    pairs = zip(responses, request["labels"], strict=True)
    return [sum(a == b for a, b in zip(response, label)) / len(label) for response, label in pairs]


class Handler(BaseHTTPRequestHandler):
    seen: ClassVar[dict[bytes, int]] = {}
    lock = threading.Lock()
    fails, at = "never", 0

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        with self.lock:
            failed = self.fails != "never" and self.seen.setdefault(text, len(self.seen) + 1) >= self.at
        if failed and self.fails == "dies":
            os._exit(1)
        if failed:
            threading.Event().wait()
        body = json.dumps({"rewards": rewards(json.loads(text))}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def serve(port: int, fails: str, at: int) -> None:
    """Print that it serves, and serve until killed."""
    Handler.fails, Handler.at = fails, at
    ThreadingHTTPServer.allow_reuse_port = True
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print("serves", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
