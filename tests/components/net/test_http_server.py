"""Clients that send too slowly, too much, or nothing neither block other clients nor occupy connections."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from components.net.http_server import HEAD_BYTES, BodyLimits, read_body, read_json, server_config

GUARD_S = 120
HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n"


LIMITS = {"mb": 0.01, "values": 40, "text_mb": 0.001, "depth": 9, "all_mb": 0.015}
"""Arguments of `BodyLimits` for the server in these tests."""
_limits = BodyLimits(**LIMITS, names={"values": "max_values"})


async def parsed(request: Request) -> JSONResponse:
    async with _limits.body(request) as body:
        return JSONResponse(len(read_json(body)))


async def echo(request: Request) -> JSONResponse:
    body = await read_body(request, 0.001, 0.3)
    return JSONResponse(body.decode())


ROUTES = [Route("/", echo, methods=["POST"]), Route("/json", parsed, methods=["POST"])]


@asynccontextmanager
async def serving(head_s: float) -> AsyncIterator[int]:
    """Run a server in this process and yield its port."""
    config = server_config(Starlette(routes=ROUTES), head_s, lifespan="off")
    config.load()
    state = ServerState()
    protocol = partial(config.http_protocol_class, config, state, {})
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    server = await asyncio.get_running_loop().create_server(protocol, sock=listening, backlog=512)
    try:
        yield listening.getsockname()[1]
    finally:
        server.close()
        for connection in list(state.connections):
            connection.shutdown()


async def replied(port: int, sent: bytes, *later: bytes) -> bytes:
    """Return all bytes that the server sends until it closes the connection. The rest of the request is sent in
    parts.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        for part in later:
            await asyncio.sleep(0.05)
            writer.write(part)
        return await asyncio.wait_for(reader.read(), GUARD_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def answered(port: int) -> None:
    reply = await replied(port, HEAD + b"Connection: close\r\n\r\nbody")
    assert reply.startswith(b"HTTP/1.1 200")
    assert reply.endswith(b'"body"')


@pytest.mark.parametrize(
    "sent",
    [
        [b""],
        [b"P"],
        [HEAD],
        [HEAD, *(b"X-%d: a\r\n" % number for number in range(60))],
        [b"\r\n", *[b"\r\n"] * 60],
        [HEAD + b"\r\nbody", b"POST / HT"],
    ],
    ids=["nothing", "a byte", "half a head", "a head without an end", "empty lines", "half a head after a request"],
)
def test_a_request_head_that_times_out_ends_only_its_connection(sent: list[bytes]) -> None:
    async def many() -> None:
        async with serving(head_s=1.0) as port:
            slow = [asyncio.create_task(replied(port, *sent)) for _ in range(40)]
            await asyncio.sleep(0.1)
            await answered(port)
            for reply in await asyncio.gather(*slow):
                assert b"200" not in reply or b"HT" in sent[-1]

    asyncio.run(many())


def test_a_head_above_the_limit_ends_its_connection() -> None:
    async def send() -> None:
        async with serving(head_s=GUARD_S) as port:
            reply = await replied(port, HEAD, *[b"X: " + b"a" * HEAD_BYTES] * 9)
            assert b" 200 " not in reply
            await answered(port)

    asyncio.run(send())


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        (b"Content-Length: 4\r\n\r\n", b"bo", 408),
        (b"Content-Length: 9999999999\r\n\r\n", b"b" * 2000, 413),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"7d0\r\n" + b"b" * 2000 + b"\r\n", 413),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"ffffffffffffffffffff\r\n", 400),
        (b"Content-Length: -4\r\n\r\n", b"", 400),
        (b"Content-Length: 4\r\nContent-Length: 5\r\n\r\n", b"body!", 400),
        (b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n", b"0\r\n\r\nPOST / HTTP/1.1\r\n\r\n", 400),
        (b"Transfer-Encoding: xchunked\r\n\r\n", b"body", 400),
        (b"Content-Length : 4\r\n\r\n", b"body", 400),
        (b"X: a\0b\r\nContent-Length: 4\r\n\r\n", b"body", 400),
    ],
)
def test_a_late_oversized_or_ambiguous_body_is_refused(head: bytes, body: bytes, status: int) -> None:
    async def send() -> None:
        async with serving(head_s=GUARD_S) as port:
            sent = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n" + head + body
            reply = await replied(port, sent)
            assert reply.startswith(b"HTTP/1.1 %d" % status), reply
            assert reply.count(b"HTTP/1.1") == 1
            await answered(port)

    asyncio.run(send())


def test_a_timely_request_is_answered_on_a_connection_of_any_age() -> None:
    async def talk() -> None:
        async with serving(head_s=0.5) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(3):
                writer.write(HEAD + b"\r\nbody")
                assert b" 200 " in await asyncio.wait_for(reader.readuntil(b'"body"'), GUARD_S)
                await asyncio.sleep(0.7)
            writer.close()

    asyncio.run(talk())


BODIES: dict[str, tuple[bytes, int, bytes]] = {
    "numbers": (b"[" + b"1," * 39 + b"1]", 413, b"40 values (max_values)"),
    "empty lists": (b"[" + b"[]," * 39 + b"[]]", 413, b"40 values"),
    "a list of the limit": (b"[" + b"1," * 37 + b"1]", 200, b"38"),
    "objects": (b'{"a":' * 10 + b"1" + b"}" * 10, 413, b"brackets"),
    "lists in lists": (b"[" * 10 + b"]" * 10, 413, b"9 brackets in brackets"),
    "lists one after the other": (b"[" + b"[]," * 15 + b"[]]", 200, b"16"),
    "a text": (b'["' + b"a" * 1001 + b'"]', 413, b"a text is larger than 0.001 MB"),
    "a text of the limit": (b'["' + b"a" * 1000 + b'"]', 200, b"1"),
    "texts": (b'["' + b"a" * 900 + b'","' + b"b" * 900 + b'"]', 200, b"2"),
    "marks in a text": (b'["' + b"[,{:" * 100 + b'"]', 200, b"1"),
    "quotes in a text": (b'["' + rb"\"\\" * 100 + b'", 1]', 200, b"2"),
    "quotes that hide numbers": (b'["\\\\", ' + b"1," * 50 + b'"\\""]', 413, b"40 values"),
    "a text that does not end": (b'["' + b"a" * 2000, 413, b"a text"),
}


@pytest.mark.parametrize("step", [1, 2, 7, 10**6])
@pytest.mark.parametrize("case", BODIES)
def test_json_limits_apply_during_arrival_for_any_chunking(case: str, step: int) -> None:
    body, status, fact = BODIES[case]

    async def send() -> None:
        async with serving(head_s=GUARD_S) as port:
            parts = [body[start : start + step] for start in range(0, len(body), step)]
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
            head = b"POST /json HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            reply = await replied(port, head + chunks)
            assert reply.startswith(b"HTTP/1.1 %d" % status), reply
            assert fact in reply
            assert _limits.held_bytes == 0

    asyncio.run(send())


def test_a_content_length_over_the_limit_is_refused_before_the_body_arrives() -> None:
    async def send() -> None:
        async with serving(head_s=GUARD_S) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /json HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n")
            reply = await asyncio.wait_for(reader.readuntil(b"send less"), GUARD_S)
            assert b" 413 " in reply and b"0.01 MB" in reply
            writer.close()

    asyncio.run(send())


def test_after_a_refused_body_the_connection_serves_the_next_request() -> None:
    async def send() -> None:
        async with serving(head_s=GUARD_S) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            size = 8 * HEAD_BYTES
            writer.write(b"POST /json HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size)
            assert b" 413 " in await asyncio.wait_for(reader.readuntil(b"send less"), GUARD_S)
            for _ in range(8):
                writer.write(b"a" * HEAD_BYTES)
                await writer.drain()
                await asyncio.sleep(0.01)
            writer.write(HEAD + b"Connection: close\r\n\r\nbody")
            assert b'"body"' in await asyncio.wait_for(reader.read(), GUARD_S)
            writer.close()

    asyncio.run(send())


def test_a_refused_body_that_does_not_end_ends_its_connection() -> None:
    async def send() -> None:
        async with serving(head_s=1.0) as port:
            head = b"POST /json HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n"
            reply = await replied(port, head, b"a", b"a")
            assert b" 413 " in reply
            await answered(port)

    asyncio.run(send())


def test_the_total_size_of_all_bodies_is_limited() -> None:
    async def send() -> None:
        async with serving(head_s=GUARD_S) as port:
            head = b"POST /json HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 9500\r\n\r\n"
            body = b"[" + (b'"' + b"a" * 900 + b'",') * 10
            _, holding = await asyncio.open_connection("127.0.0.1", port)
            holding.write(head + body)
            while _limits.held_bytes < len(body):
                await asyncio.sleep(0.01)
            reply = await replied(port, head + body)
            assert reply.startswith(b"HTTP/1.1 503")
            assert b"retry-after" in reply.lower()
            holding.close()
            while _limits.held_bytes:
                await asyncio.sleep(0.01)
            await answered(port)

    asyncio.run(send())


def test_bodies_in_other_encodings_than_utf_8_are_refused() -> None:
    with pytest.raises(ValueError, match="utf-8"):
        read_json("[1, 2]".encode("utf-16"))
