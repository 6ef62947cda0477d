"""Common parts of our HTTP servers: the configuration of uvicorn, and limits on the time and size of requests."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

TOO_SLOW = 408
"""Status: the request has not arrived in time."""
TOO_LARGE = 413
"""Status: the request exceeds a limit of size."""
GONE = 499
"""Status: the client has closed the connection."""
BUSY = 503
"""Status: all requests together exceed a limit of size."""
SENDING_S = 60.0
"""Default timeout in seconds for receiving the head of a request, and for receiving its body."""
BODY_MB = 64.0
"""Default maximum size of a body in MB."""
HEAD_BYTES = 2**16
"""Maximum size of the head of a request in bytes. uvicorn itself sets no limit."""
_PROTOCOL: Any = HttpToolsProtocol
"""Parser of uvicorn. The other one accepts requests with two different lengths."""


def server_config(app: Any, head_s: float = SENDING_S, **options: Any) -> uvicorn.Config:
    """Return the uvicorn configuration of an app.

    Args:
        app: app of Starlette or FastAPI.
        head_s: timeout in seconds for the head of a request, from the start of the connection or from the first byte of
            a later request. uvicorn itself waits forever, and every waiting connection holds a file descriptor.
        options: further options of `uvicorn.Config`.
    """

    class Connection(_PROTOCOL):
        """A connection that is aborted if the head of a request does not arrive in time or is too long.

        A refused request can be answered before its body has arrived. The client then has `head_s` seconds to send the
        rest, which is dropped. If the connection were closed at once, the client would see a broken connection instead
        of the response.
        """

        late: asyncio.TimerHandle | None = None
        received = 0
        in_body = False

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.late = self.loop.call_later(head_s, transport.abort)

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            self.in_body = True
            self.stop_timer()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self.in_body = False
            self.stop_timer()

        def data_received(self, data: bytes) -> None:
            was_in_body = self.in_body
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self.stop_timer()
                return
            # Only bytes outside of bodies belong to a head.
            if not was_in_body and not self.in_body:
                self.received += len(data)
            has_more_to_come = self.in_body or not was_in_body
            if self.received > HEAD_BYTES:
                self.transport.abort()
            elif self.late is None and has_more_to_come:
                self.late = self.loop.call_later(head_s, self.transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.stop_timer()

        def stop_timer(self) -> None:
            self.received = 0
            if self.late is not None:
                self.late.cancel()
                self.late = None

    return uvicorn.Config(app, http=Connection, log_level="warning", access_log=False, **options)


@dataclass(kw_only=True)
class BodyLimits:
    """Limits on the JSON bodies of requests to one server.

    They are checked while a body arrives, before it is parsed, because a parsed value can take a hundred times the
    memory of its text.
    """

    mb: float = BODY_MB
    """Maximum size of a body in MB."""
    values: int = 1_000_000
    """Maximum number of values in a body."""
    text_mb: float = 1.0
    """Maximum size of a text in a body in MB."""
    depth: int | None = None
    """Maximum depth of nested brackets. None leaves the limit to the parser."""
    seconds: float = SENDING_S
    """Timeout in seconds for receiving a body."""
    all_mb: float = 256.0
    """Maximum total size in MB of all bodies that are being received or processed."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Options that set `mb`, `values` and `text_mb`, for error messages."""
    held_bytes: int = 0
    """Current total size in bytes of all bodies that are being received or processed."""

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """Receive the body of a request. It counts towards `all_mb` until the end of the context.

        Raises:
            HTTPException: status 413 if a limit is exceeded, 503 if all bodies together are too large, or as in
                `read_body`.
        """
        meter = _Meter(self)
        received = 0

        def count(part: bytes) -> None:
            nonlocal received
            received += len(part)
            self.held_bytes += len(part)
            if self.held_bytes > self.all_mb * 1e6:
                reason = f"requests under way have more than {self.all_mb:g} MB; try again"
                raise HTTPException(BUSY, reason, {"Retry-After": "1"})
            meter.feed(part)

        try:
            yield await read_body(request, self.mb, self.seconds, count, self._named("mb"))
        finally:
            # Also after an error. Otherwise refused bodies would fill up the limit until the server refuses all.
            self.held_bytes -= received

    def _named(self, limit: str) -> str:
        if limit not in self.names:
            return ""
        return f" ({self.names[limit]})"

    def refuse(self, limit: str, fault: str) -> NoReturn:
        """Raise the HTTPException for a body that exceeds a limit."""
        raise HTTPException(TOO_LARGE, f"{fault}{self._named(limit)}; send less")


class _Meter:
    """Incremental count of the values in JSON, and of the sizes of its texts. The JSON may be invalid."""

    _TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
    """A text, complete or up to the end of the data."""
    _WHOLE_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
    """A complete text."""
    _BRACKET = re.compile(rb"[\[\]{}]")

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._values = 1
        self._depth = 0
        self._begun = b""
        """Replacement for the start of an incomplete text: a quote, and a backslash if its last byte is one."""
        self._begun_bytes = 0
        """Size of the start of an incomplete text."""

    def feed(self, part: bytes) -> None:
        """Count the next part of the data.

        Raises:
            HTTPException: a limit is exceeded.
        """
        data = self._begun + part
        texts = self._TEXT.findall(data)
        others = self._TEXT.split(data)
        # The last text is incomplete if the data ends inside of it.
        is_open = bool(texts) and not others[-1] and self._WHOLE_TEXT.fullmatch(texts[-1]) is None
        sizes = [len(text) - 2 for text in texts]
        if is_open:
            sizes[-1] += 1
        if self._begun:
            sizes[0] += self._begun_bytes - (len(self._begun) - 1)
        if sizes and max(sizes) > self._limits.text_mb * 1e6:
            self._limits.refuse("text_mb", f"a text is larger than {self._limits.text_mb:g} MB")
        self._begun = b""
        if is_open:
            backslashes = len(texts[-1]) - len(texts[-1].rstrip(b"\\"))
            self._begun = b'"'
            # An unpaired backslash escapes the first byte of the next part.
            if backslashes % 2:
                self._begun = b'"\\'
            self._begun_bytes = sizes[-1]
        self._count(b"".join(others))

    def _count(self, outside: bytes) -> None:
        """Count the values and the depth in the data outside of texts."""
        # Each of these marks is followed by one more value.
        self._values += sum(outside.count(mark) for mark in (b",", b":", b"[", b"{"))
        if self._values > self._limits.values:
            self._limits.refuse("values", f"the body has more than {self._limits.values} values")
        if self._limits.depth is None:
            return
        for mark in self._BRACKET.findall(outside):
            if mark in b"[{":
                self._depth += 1
            else:
                self._depth -= 1
            if self._depth > self._limits.depth:
                self._limits.refuse("depth", f"the body has more than {self._limits.depth} brackets in brackets")


async def read_body(
    request: Request,
    most_mb: float = BODY_MB,
    seconds: float = SENDING_S,
    note: Callable[[bytes], None] | None = None,
    named: str = "",
) -> bytes:
    """Receive the body of a request, up to a maximum size.

    Args:
        request: the request.
        most_mb: maximum size in MB.
        seconds: timeout in seconds.
        note: called with each part of the body. An exception that it raises ends the reading.
        named: option that sets the size, for the error message.

    Raises:
        HTTPException: the body is too large (413), has not arrived in time (408), or the client has closed the
            connection (499).
    """
    body = bytearray()
    too_large = HTTPException(TOO_LARGE, f"the body is larger than {most_mb:g} MB{named}; send less")
    length = request.headers.get("content-length", "")
    # The declared length is checked first, so that a large body is rejected before it arrives. At most 20 digits are
    # parsed, because int() refuses thousands of them with a ValueError.
    if length.isdecimal() and int(length[:20]) > most_mb * 1e6:
        raise too_large
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                # The declared length may be missing or wrong.
                if len(body) > most_mb * 1e6:
                    raise too_large
                if note is not None:
                    note(part)
    except TimeoutError as error:
        raise HTTPException(TOO_SLOW, f"the body has not arrived within {seconds:g} s") from error
    except ClientDisconnect as error:
        raise HTTPException(GONE, "the client has closed the connection") from error
    return bytes(body)


def read_json(body: bytes) -> Any:
    """Parse JSON in UTF-8, the only encoding that `BodyLimits` can measure.

    Raises:
        ValueError: the body is not UTF-8, or not valid JSON.
    """
    try:
        return json.loads(body.decode())
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error
