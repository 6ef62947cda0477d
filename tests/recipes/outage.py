"""A reward server that fails on purpose, in a process of its own, and runs that meet it.

`python outage.py serve PORT FAILS AT` serves, and `python outage.py meet ...` runs; `Server` and `meet` start these.
"""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).parents[2]


def held_port() -> socket.socket:
    """A port that is nobody else's while this is open. It does not listen: without a `Server` there, a call is refused
    as where nothing runs.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held


class Server:
    """Gives answers the share of the label's letters that they have in their places."""

    def __init__(self, held: socket.socket, fails: str = "never", at: int = 0) -> None:
        """At a `held_port`.

        `fails`: it `dies`, or `hangs`, at request number `at`, and from then on; a new try has the number of the first.
        """
        self.port = held.getsockname()[1]
        command = [sys.executable, __file__, "serve", str(self.port), fails, str(at)]
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
    """Of each answer, which follows its prompt in the query."""
    answers = [query[len(prompt) :] for query, prompt in zip(request["query"], request["prompts"], strict=True)]
    pairs = zip(answers, request["labels"], strict=True)
    return [sum(a == b for a, b in zip(answer, label)) / len(label) for answer, label in pairs]


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
        """Say nothing."""


def serve(port: int, fails: str, at: int) -> None:
    """Say that it serves, and do so until killed."""
    Handler.fails, Handler.at = fails, at
    ThreadingHTTPServer.allow_reuse_port = True
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print("serves", flush=True)
    server.serve_forever()


def meet(recipe: str, folder: Path, option: str, options: Sequence[str], outages: Sequence[tuple[str, int]]) -> Any:
    """Run a recipe twice, with a server that answers all and with one that fails, and is started again, several times.

    Args:
        recipe: its name; it runs with backend=local, all starts in one process of its own.
        folder: the runs are its `undisturbed` and its `disturbed`.
        option: that the server's URL is given to.
        options: all others.
        outages: how each server of the second run fails, and at which of its requests; the last one does not.

    Returns:
        Of each start of the second run its exit code and what it wrote to stderr.
    """
    given = [recipe, str(folder), option, json.dumps(list(options)), json.dumps(list(outages))]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    command = [sys.executable, __file__, "meet", *given]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads((folder / "starts.json").read_text())


def _meet(recipe: str, folder: Path, option: str, options: list[str], outages: list[tuple[str, int]]) -> None:
    main, held = import_module(f"recipes.{recipe}.main").main, held_port()
    starts: list[tuple[int, str]] = []
    for name, fails, at in [("undisturbed", "never", 0), *(("disturbed", *outage) for outage in outages)]:
        server, error = Server(held, fails, at), io.StringIO()
        with contextlib.redirect_stderr(error):
            code = main([f"run_dir={folder / name}", f"{option}={server.url}", *options, "backend=local"])
        starts.append((code, error.getvalue()))
        server.close()
    assert starts[0][0] == 0, starts[0][1]
    (folder / "starts.json").write_text(json.dumps(starts[1:]))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        _meet(sys.argv[2], Path(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5]), json.loads(sys.argv[6]))
