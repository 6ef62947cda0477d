"""What our HTTP servers have in common: uvicorn, quiet, and limits on what a client sends and how long it takes."""

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

TOO_SLOW, TOO_LARGE, GONE, BUSY = 408, 413, 499, 503
SENDING_S = 60.0
"""Seconds that a client usually has for the head of a request, and for its body."""
BODY_MB = 64.0
HEAD_BYTES = 2**16
"""Of a request's head; uvicorn itself takes any."""
_PROTOCOL: Any = HttpToolsProtocol
"""uvicorn's other parser takes requests whose length is given in two ways."""


def server_config(app: Any, head_s: float = SENDING_S, **options: Any) -> uvicorn.Config:
    """How uvicorn serves an app.

    Args:
        app: of Starlette or FastAPI.
        head_s: seconds from the start of a connection, or from the first byte of a later request, until the head of the
            request has to be there. uvicorn itself waits without end, and each that waits holds a descriptor.
        options: further ones of `uvicorn.Config`.
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
    """Limits on the bodies of requests of JSON, of one server; they are checked while a body arrives, before it is
    parsed. A parsed value can take a hundred times the memory of its text.
    """

    mb: float = BODY_MB
    """Size of one body."""
    values: int = 1_000_000
    """Number of values in one body."""
    text_mb: float = 1.0
    """Size of one text in it."""
    depth: int | None = None
    """Number of brackets in brackets. Default: as many as the parser takes."""
    seconds: float = SENDING_S
    """Time that a client has to send one."""
    all_mb: float = 256.0
    """Size of all bodies together that are being received or worked on."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Options that set `mb`, `values` and `text_mb`, where a user can set them."""
    held_bytes: int = 0

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, which counts as held until the end of the context.

        Raises:
            HTTPException: with status 413 where a limit is exceeded, 503 where all bodies together are too large, or
                as `read_body`.
        """
        meter = _Meter(self)
        taken = 0

        def note(part: bytes) -> None:
            nonlocal taken
            taken += len(part)
            self.held_bytes += len(part)
            if self.held_bytes > self.all_mb * 1e6:
                why = f"requests under way have more than {self.all_mb:g} MB; try again"
                raise HTTPException(BUSY, why, {"Retry-After": "1"})
            meter.feed(part)

        try:
            yield await read_body(request, self.mb, self.seconds, note, self._named("mb"))
        finally:
            self.held_bytes -= taken

    def _named(self, limit: str) -> str:
        return f" ({self.names[limit]})" if limit in self.names else ""

    def refuse(self, limit: str, what: str) -> NoReturn:
        """Refuse a body that exceeds a limit."""
        raise HTTPException(TOO_LARGE, f"{what}{self._named(limit)}; send less")


class _Meter:
    """Counts the values of JSON and measures its texts, while it arrives. It need not be valid."""

    _TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
    """A text, the last one up to the end of what is there."""
    _WHOLE_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
    _BRACKET = re.compile(rb"[\[\]{}]")

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._values = 1
        self._depth = 0
        self._begun = b""
        """How a text begins that is not complete: a quote, and a backslash where one has come last."""
        self._begun_bytes = 0

    def feed(self, part: bytes) -> None:
        """Count what has come further."""
        data = self._begun + part
        texts = self._TEXT.findall(data)
        others = self._TEXT.split(data)
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
            self._begun = b'"\\' if backslashes % 2 else b'"'
            self._begun_bytes = sizes[-1]
        self._count(b"".join(others))

    def _count(self, outside: bytes) -> None:
        """Count the values between which these marks stand."""
        self._values += sum(outside.count(mark) for mark in (b",", b":", b"[", b"{"))
        if self._values > self._limits.values:
            self._limits.refuse("values", f"the body has more than {self._limits.values} values")
        if self._limits.depth is None:
            return
        for mark in self._BRACKET.findall(outside):
            self._depth += 1 if mark in b"[{" else -1
            if self._depth > self._limits.depth:
                self._limits.refuse("depth", f"the body has more than {self._limits.depth} brackets in brackets")


async def read_body(
    request: Request,
    most_mb: float = BODY_MB,
    seconds: float = SENDING_S,
    note: Callable[[bytes], None] | None = None,
    named: str = "",
) -> bytes:
    """The body of a request, read no further than it may be long.

    Args:
        request: it.
        most_mb: its size.
        seconds: time that its sender has.
        note: called with each part as it comes; what it raises ends the reading.
        named: names the option that sets the size, for the message.

    Raises:
        HTTPException: it is longer, has not come in time, or its sender has gone.
    """
    body = bytearray()
    too_large = HTTPException(TOO_LARGE, f"the body is larger than {most_mb:g} MB{named}; send less")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most_mb * 1e6:
        raise too_large
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most_mb * 1e6:
                    raise too_large
                if note is not None:
                    note(part)
    except TimeoutError as error:
        raise HTTPException(TOO_SLOW, f"the body has not come in {seconds:g} s") from error
    except ClientDisconnect as error:
        raise HTTPException(GONE, "the caller has gone") from error
    return bytes(body)


def read_json(body: bytes) -> Any:
    """Parse JSON in UTF-8, the one encoding in which `BodyLimits` has measured it.

    Raises:
        ValueError: it is none.
    """
    try:
        return json.loads(body.decode())
    except RecursionError as error:
        raise ValueError("it has too many brackets in brackets") from error
