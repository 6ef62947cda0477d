"""Check without Ray, which would try for minutes, that the cluster of $RAY_ADDRESS can be reached."""

import os
import re
import socket
import threading
from pathlib import Path

from core.errors import JobError

is_ray_left = threading.Event()
"""Set if Ray ended before the job: its library has threads in this process that may not end for a minute, and hold up
the end of the process. A program whose work is done leaves with `os._exit`.
"""
REACHED_WITHIN_S = 10.0
_SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
"""An empty frame of HTTP/2; its fourth byte is the kind of the frame, which begins each side's part of a connection."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS
_CURRENT = "ray_current_cluster"
"""The file in Ray's folder in which `ray start` leaves the address that `auto` stands for."""


def check_reachable(address: str) -> None:
    """Connect to a cluster's port: of `HOST:PORT`, `ray://HOST:PORT`, or the one that `auto` finds on this machine.

    Raises:
        JobError: nothing responds there, or no server of Ray's; the message says what to set.
    """
    place, found = address, address
    if address == "auto":
        file = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / _CURRENT
        found = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        if not found:
            raise JobError(
                f"RAY_ADDRESS=auto, and no Ray cluster was started on this machine (no {file}); start one (ray start "
                "--head), set RAY_ADDRESS to HOST:PORT of one, or unset it"
            )
        place = f"{found} (RAY_ADDRESS=auto)"
    host_port = re.fullmatch(r"(?:ray://)?\[?([^/\]]+)\]?:(\d+)", found)
    if host_port is None:
        return
    try:
        with socket.create_connection((host_port[1], int(host_port[2])), REACHED_WITHIN_S) as connection:
            speaks = _speaks_http2(connection)
    except OSError as error:
        raise JobError(f"no Ray cluster responds at {place} ({error}); start it, or unset RAY_ADDRESS") from error
    if not speaks:
        raise JobError(f"what responds at {place} is no Ray cluster; set RAY_ADDRESS to one, or unset it")


def _speaks_http2(connection: socket.socket) -> bool:
    """Tell whether a server greets as a gRPC server does, which Ray's are. It raises TimeoutError if it is silent."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return True  # it greets inside of TLS, which Ray sets up itself
    connection.sendall(_GREETING)
    reply = b""
    while len(reply) < len(_SETTINGS):
        part = connection.recv(len(_SETTINGS) - len(reply))
        if not part:
            return False
        reply += part
    return reply[3] == _SETTINGS[3]


def unanswered(address: str, seconds: float, error: BaseException | None = None) -> JobError:
    """An error about a cluster whose port is open, and that Ray cannot join."""
    text = "" if error is None else f" ({next(iter(str(error).splitlines()), type(error).__name__)})"
    if error is not None and re.search(r"token|authenticat|unauthori", str(error), re.IGNORECASE):
        return JobError(
            f"the Ray cluster at {address} takes no call with the token of this process{text}; set RAY_AUTH_MODE=token "
            "and RAY_AUTH_TOKEN_PATH to the file with the cluster's token, or unset both where it has none"
        )
    return JobError(
        f"no Ray cluster responds at {address} within {seconds:g} s{text}; see that it runs there and, where it has a "
        "token, that RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH name it; or unset RAY_ADDRESS"
    )
