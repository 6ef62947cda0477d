"""Check that the cluster at $RAY_ADDRESS is reachable. Without Ray, whose own attempts would take minutes."""

import os
import re
import socket
import threading
from pathlib import Path

from core.errors import JobError

is_ray_left = threading.Event()
"""Set if Ray ended before the job. Threads of Ray's library may then run for another minute and delay the exit of the
process, so a program that has finished should exit with `os._exit`.
"""
REACHED_WITHIN_S = 10.0
_SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
"""An empty SETTINGS frame of HTTP/2, the first frame of each side. The fourth byte is the type of a frame."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS
_CURRENT = "ray_current_cluster"
"""Name of the file in Ray's folder to which `ray start` writes the address for `auto`."""


def check_reachable(address: str) -> None:
    """Check that a Ray cluster responds at `HOST:PORT`, `ray://HOST:PORT`, or `auto` (the one on this machine).

    Raises:
        JobError: no server responds, or it is not a Ray server. The message says what to set.
    """
    cluster = place = address
    if address == "auto":
        file = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / _CURRENT
        cluster = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        if not cluster:
            raise JobError(
                f"RAY_ADDRESS=auto, but no Ray cluster was started on this machine (no {file}); start one (ray start "
                "--head), set RAY_ADDRESS to HOST:PORT of one, or unset it"
            )
        place = f"{cluster} (RAY_ADDRESS=auto)"
    host_port = re.fullmatch(r"(?:ray://)?\[?([^/\]]+)\]?:(\d+)", cluster)
    if host_port is None:
        return
    try:
        with socket.create_connection((host_port[1], int(host_port[2])), REACHED_WITHIN_S) as connection:
            is_http2 = _speaks_http2(connection)
    except OSError as error:
        raise JobError(f"no Ray cluster responds at {place} ({error}); start it, or unset RAY_ADDRESS") from error
    if not is_http2:
        raise JobError(f"the server at {place} is not a Ray cluster; set RAY_ADDRESS to a cluster, or unset it")


def _speaks_http2(connection: socket.socket) -> bool:
    """True if the server sends an HTTP/2 preface, as Ray's gRPC servers do. Raises TimeoutError if it sends nothing."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return True  # the preface is sent inside TLS, which only Ray can set up
    connection.sendall(_GREETING)
    reply = b""
    while len(reply) < len(_SETTINGS):
        part = connection.recv(len(_SETTINGS) - len(reply))
        if not part:
            return False
        reply += part
    return reply[3] == _SETTINGS[3]


def unanswered(address: str, seconds: float, error: BaseException | None = None) -> JobError:
    """Return the error for a cluster whose port is open, but that Ray cannot join."""
    text = "" if error is None else f" ({next(iter(str(error).splitlines()), type(error).__name__)})"
    if error is not None and re.search(r"token|authenticat|unauthori", str(error), re.IGNORECASE):
        return JobError(
            f"the Ray cluster at {address} rejects the token of this process{text}; set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH to the file with the cluster's token, or unset both if the cluster has no token"
        )
    return JobError(
        f"no Ray cluster responds at {address} within {seconds:g} s{text}; check that it is running and, if it has a "
        "token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to its file; or unset RAY_ADDRESS"
    )
