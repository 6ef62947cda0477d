"""HTTP client for untrusted servers: every request has limits of time and size.

httpx limits the time between two parts of a response, so it would wait forever for a server that regularly sends a
byte, a header or an interim response. Here a request runs in an event loop, which cancels it at its deadline.
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from components.net.direct import is_loopback

MOST_BYTES = 2**26
"""Maximum size of the body of a response, before and after decompression."""
_GZIP = 31
"""Window size of zlib that selects the gzip format."""


class UnreadableError(ValueError):
    """Raised for a response whose body is too large, or compressed in an unsupported way."""


@dataclass(frozen=True)
class Reply:
    """A complete response."""

    status: int
    """Status code."""
    headers: httpx.Headers
    packed: bytes
    """Body as received."""

    def body(self) -> bytes:
        """Return the decompressed body.

        Raises:
            UnreadableError: the body has an encoding other than one layer of gzip, is not valid gzip, or is larger than
                MOST_BYTES.
        """
        encodings = [name.strip().lower() for name in self.headers.get("content-encoding", "").split(",")]
        encodings = [name for name in encodings if name not in ("", "identity")]
        if not encodings:
            return self.packed
        if encodings not in (["gzip"], ["x-gzip"]):
            raise UnreadableError(f"the header Content-Encoding {', '.join(encodings)!r}; send it plain, or as gzip")
        unpacker = zlib.decompressobj(wbits=_GZIP)
        try:
            # Without the limit a few kilobytes could decompress to gigabytes.
            text = unpacker.decompress(self.packed, MOST_BYTES + 1)
        except zlib.error as error:
            raise UnreadableError(f"a body that is no gzip ({error})") from error
        if len(text) > MOST_BYTES:
            raise UnreadableError(f"more than {MOST_BYTES >> 20} MB, unpacked")
        if not unpacker.eof:
            raise UnreadableError("a gzip body that is cut off")
        if unpacker.unused_data:
            raise UnreadableError("a gzip body that is followed by more")
        return text

    def excerpt(self, length: int = 200) -> str:
        """Return the start of the body for an error message."""
        try:
            body = self.body()
        except UnreadableError:
            body = self.packed
        return repr(body[: 4 * length].decode(errors="replace")[:length])


class HttpClient:
    """Client that can be used from any thread. Connections are kept open until `close`."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        """Start the thread of the event loop, without sending anything.

        Args:
            headers: headers of every request.
        """
        # Only gzip, because `Reply.body` limits its decompressed size.
        self._headers = {"Accept-Encoding": "gzip", **(headers or {})}
        self._clients: dict[bool, httpx.AsyncClient] = {}
        # A loop and a thread of its own, because callers may run in threads without an event loop.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def post(self, url: str, body: bytes, limit_s: float) -> Reply:
        """Send JSON and return the response.

        Args:
            url: URL of the server. Loopback addresses are reached without a proxy.
            body: the JSON.
            limit_s: timeout in seconds, from the connection to the last byte.

        Raises:
            UnreadableError: the body is larger than MOST_BYTES.
            TimeoutError: the timeout has passed.
            httpx.TransportError: the connection or the protocol failed.
        """
        return asyncio.run_coroutine_threadsafe(self._post(url, body, limit_s), self._loop).result()

    def close(self) -> None:
        """Cancel all requests and close the connections."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _post(self, url: str, body: bytes, limit_s: float) -> Reply:
        client = self._client(url)
        headers = {"Content-Type": "application/json"}
        packed = bytearray()
        async with asyncio.timeout(limit_s), client.stream("POST", url, content=body, headers=headers) as response:
            async for part in response.aiter_raw():
                packed += part
                # Checked for every part, because Content-Length may be wrong or missing.
                if len(packed) > MOST_BYTES:
                    raise UnreadableError(f"more than {MOST_BYTES >> 20} MB")
            return Reply(response.status_code, response.headers, bytes(packed))

    def _client(self, url: str) -> httpx.AsyncClient:
        is_direct = is_loopback(urlsplit(url).hostname or "")
        if is_direct not in self._clients:
            # With its own transport a client ignores proxies of the environment, but still reads the certificates.
            transport = None
            if is_direct:
                transport = httpx.AsyncHTTPTransport()
            # No timeout here, because `post` has one for the complete request.
            self._clients[is_direct] = httpx.AsyncClient(timeout=None, headers=self._headers, transport=transport)
        return self._clients[is_direct]

    async def _end(self) -> None:
        # Requests of other threads may still be running.
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        for client in self._clients.values():
            await client.aclose()
