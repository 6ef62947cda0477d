"""A real reward server for tests, on a free port of this machine."""

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Request = dict[str, list[Any]]
Answer = tuple[int, Any, dict[str, str]]
"""Status, JSON or raw bytes, headers."""


class RewardServer(ThreadingHTTPServer):
    """A real server on a free port. `response(request, number)` returns its response to the request with that
    number.
    """

    daemon_threads = True

    def __init__(self, response: Callable[[Request, int], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.response = response
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do not report disconnected clients, because some tests disconnect on purpose."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, RewardServer)
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append(request)
            number = len(server.requests)
        status, response, headers = server.response(request, number)
        body = response if isinstance(response, bytes) else json.dumps(response).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        try:
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:
            # The client has disconnected, which some tests do on purpose.
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
