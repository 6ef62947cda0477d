"""What our HTTP servers have in common: uvicorn, quiet, and limits on what a client sends and how long it takes."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

TOO_SLOW, TOO_LARGE, GONE = 408, 413, 499
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
        """Ends itself when a head does not come in time, or does not end."""

        late: asyncio.TimerHandle | None = None
        received = 0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.late = self.loop.call_later(head_s, transport.abort)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self.stop_waiting()
                return
            self.received += len(data)
            if self.received > HEAD_BYTES:
                self.transport.abort()
            elif self.late is None:
                self.late = self.loop.call_later(head_s, self.transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.stop_waiting()

        def stop_waiting(self) -> None:
            """The head is there, or nobody is left to send it."""
            self.received = 0
            if self.late is not None:
                self.late.cancel()
                self.late = None

    return uvicorn.Config(app, http=Connection, log_level="warning", access_log=False, **options)


async def read_body(request: Request, most_mb: float = BODY_MB, seconds: float = SENDING_S) -> bytes:
    """The body of a request, read no further than it may be long.

    Raises:
        HTTPException: it is longer, has not come in time, or its sender has gone.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most_mb * 1e6:
                    raise HTTPException(TOO_LARGE, f"the body is larger than {most_mb:g} MB; send less")
    except TimeoutError as error:
        raise HTTPException(TOO_SLOW, f"the body has not come in {seconds:g} s") from error
    except ClientDisconnect as error:
        raise HTTPException(GONE, "the caller has gone") from error
    return bytes(body)
