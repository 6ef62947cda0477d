"""Reward servers that send invalid, oversized or endless replies. Each raises a RewardError with the URL."""

import gzip
import json
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress

import pytest

from components.net.http_client import MOST_BYTES
from components.rewards.base import RewardOutput, RewardSettings
from components.rewards.errors import RewardError
from plugins.remote_reward.scorer import RefusedError, RemoteReward
from tests.messages import says

TIMEOUT_S = 0.6
PAUSE_S = 0.1
"""Seconds between two parts of a slow reply. It is less than any timeout between two parts."""
GUARD_S = 60
Script = Callable[[], Iterable[bytes]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
RIGHT = json.dumps({"rewards": [1.0]}).encode()


class RawServer:
    """Server that ignores the request and sends the output of a script until the client closes the connection."""

    def __init__(self, script: Script, host: str = "127.0.0.1") -> None:
        self._listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._script = script
        self.connections = 0
        self.ended = threading.Event()
        host = f"[{host}]" if ":" in host else host
        self.url = f"http://{host}:{self._listening.getsockname()[1]}/score"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while not self.ended.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError:  # closed
                return
            self.connections += 1
            with closing(connection), suppress(OSError):
                request = b""
                while not request.endswith(b"}"):  # the end of its JSON
                    request += connection.recv(2**16)
                for part in self._script():
                    if self.ended.is_set():
                        return
                    connection.sendall(part)

    def close(self) -> None:
        self.ended.set()
        self._listening.close()


def ask(script: Script, timeout_s: float = GUARD_S, tries: int = 1) -> RewardOutput:
    """Return the reward of one response from a server with this script."""
    server = RawServer(script)
    settings = RewardSettings(url_timeout_s=timeout_s, url_tries=tries)
    try:
        with RemoteReward([server.url], settings, pause_s=0.01) as reward:
            return reward(["qa"], ["q"], ["a"])
    except RewardError as error:
        assert server.url in str(error) and "\n" not in str(error)
        raise
    finally:
        server.close()


def dripping(first: bytes, each: Callable[[int], bytes]) -> Script:
    """Send `first`, and then parts at intervals, without end."""

    def script() -> Iterator[bytes]:
        yield first
        for number in range(int(GUARD_S / PAUSE_S)):
            time.sleep(PAUSE_S)
            yield each(number)

    return script


def empty_block(_: int) -> bytes:
    """Return a chunk with an empty gzip block."""
    packer = zlib.compressobj(wbits=-15)
    block = packer.compress(b"") + packer.flush(zlib.Z_SYNC_FLUSH)
    return f"{len(block):x}\r\n".encode() + block + b"\r\n"


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"
GZIP_HEADER = gzip.compress(b"")[:10]


@pytest.mark.parametrize(
    "script",
    [
        dripping(b"", lambda _: b"HTTP/1.1 100 Continue\r\n\r\n"),
        dripping(b"", lambda _: b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"),
        dripping(HEAD, lambda number: f"X-{number}: y\r\n".encode()),
        dripping(b"HTTP/1.1 200 O", lambda _: b"K"),
        dripping(CHUNKED + b"\r\n1;", lambda _: b"x"),
        dripping(CHUNKED + b"\r\n", lambda _: b"1;x=y\r\n \r\n"),
        dripping(CHUNKED + b"\r\n1\r\n \r\n0\r\n", lambda number: f"X-{number}: y\r\n".encode()),
        dripping(
            CHUNKED + b"Content-Encoding: gzip\r\n\r\n" + f"{len(GZIP_HEADER):x}\r\n".encode() + GZIP_HEADER + b"\r\n",
            empty_block,
        ),
        dripping(HEAD + b"Content-Length: 100000\r\n\r\n", lambda _: b" "),
        dripping(HEAD + b"\r\n", lambda _: b" "),  # until the connection is closed
        dripping(b"", lambda _: b""),
    ],
    ids=["100", "103", "header", "status", "extension", "chunk", "trailer", "gzip", "length", "close", "nothing"],
)
def test_a_request_ends_at_its_deadline_although_the_server_keeps_sending(script: Script) -> None:
    began = time.monotonic()
    with pytest.raises(RewardError, match=f"{TIMEOUT_S:g} s"):
        ask(script, TIMEOUT_S)
    assert time.monotonic() - began < 20


def test_a_flood_of_interim_responses_ends_at_the_deadline() -> None:
    def flood() -> Iterator[bytes]:
        while True:
            yield b"HTTP/1.1 100 Continue\r\n\r\n" * 1000

    with pytest.raises(RewardError, match=f"{TIMEOUT_S:g} s"):
        ask(flood, TIMEOUT_S)


def sent(body: bytes, *headers: str, status: str = "200 OK") -> Script:
    """Send one complete response unchanged."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return lambda: ["\r\n".join(lines).encode("latin-1") + body]


def nested(levels: int) -> bytes:
    return b'{"rewards": ' + b"[" * levels + b"1" + b"]" * levels + b"}"


PACKED = gzip.compress(RIGHT)


@pytest.mark.parametrize(
    ("script", "facts"),
    [
        (sent(gzip.compress(gzip.compress(RIGHT)), "Content-Encoding: gzip, gzip"), ["gzip, gzip"]),
        (sent(PACKED, "Content-Encoding: gzip", "Content-Encoding: gzip"), ["gzip, gzip"]),
        (sent(zlib.compress(RIGHT), "Content-Encoding: deflate"), ["deflate"]),
        (sent(RIGHT, "Content-Encoding: br"), ["br"]),
        (sent(RIGHT, "Content-Encoding: gzip"), ["gzip"]),
        (sent(PACKED[:-3], "Content-Encoding: gzip"), ["gzip", "cut off"]),
        (sent(PACKED + b"x", "Content-Encoding: gzip"), ["gzip", "followed by more"]),
        (sent(gzip.compress(b" " * 2 * MOST_BYTES), "Content-Encoding: gzip"), ["64 MB", "unpacked"]),
        (sent(b" " * (MOST_BYTES + 1)), ["64 MB"]),
        (sent(nested(900)), ["nested"]),
        (sent(nested(100_000)), ["JSON"]),
        (sent(b"[" * 100_000), ["JSON"]),
        (sent(b"<html>", "Content-Type: text/html"), ["JSON", "text/html", "<html>"]),
        (sent(b""), ["JSON"]),
        (sent(b"\xff\xfe\xfa"), ["JSON"]),
        (sent(b'{"rewards": [1e999]}'), ["inf"]),
        (sent(b'{"rewards": [' + b"9" * 400 + b"]}"), ["inf"]),
        (sent(b'{"rewards": [' + b"9" * 10_000 + b"]}"), ["JSON"]),
        (sent(b'{"rewards": [1e39]}'), ["1e+39"]),
        (sent(b'{"rewards": [NaN]}'), ["nan"]),
        (sent(b'{"rewards": [-Infinity]}'), ["inf"]),
        (sent(b'{"rewards": [1.0], "rewards": [0.0]}'), ["'rewards'", "twice"]),
        (sent(b'{"rewards": [1.0], "extra_logs": {"x": 1, "x": 2}}'), ["'x'", "twice"]),
        (sent(b'{"rewards": {"0": 1.0}}'), ["dict"]),
        (sent(b'{"rewards": ["1.0"]}'), ["str"]),
        (sent(b'{"rewards": [null]}'), ["NoneType"]),
        (sent(b"[1.0]"), ["list"]),
        (sent(RIGHT, status="204 No Content"), ["204"]),
        (sent(RIGHT, "Location: http://\u00e4\u00f6\u00fc/\x7f", status="301 Moved"), []),
        (sent(RIGHT, status="302 Found"), ["302"]),
    ],
)
def test_an_unreadable_reply_raises_a_reward_error_with_the_reason(script: Script, facts: list[str]) -> None:
    with pytest.raises(RewardError, match=says(*facts)):
        ask(script)


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"\x00\x01\x02\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12",
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 2**20 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{",
    ],
    ids=range(9),
)
def test_a_broken_exchange_is_retried_and_then_raises_a_reward_error(broken: bytes) -> None:
    with pytest.raises(RewardError, match="2 tries") as caught:
        ask(lambda: [broken], tries=2)
    assert not isinstance(caught.value, RefusedError)


def test_headers_that_are_not_ascii_and_one_layer_of_gzip_are_read() -> None:
    headers = [
        "X-Name: \u00e4\u00f6\u00fc",
        "Set-Cookie: \u00e4=\u00f6",
        "Content-Type: application/json; charset=\u00e4",
    ]
    assert ask(sent(RIGHT, *headers)).reward_B.tolist() == [1.0]
    assert ask(sent(PACKED, *headers, "Content-Encoding: GZIP")).reward_B.tolist() == [1.0]
    assert ask(sent(b'{"rewards": [1.0], "extra_logs": {"x": NaN}}')).logs["x"].isnan().tolist() == [True]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_loopback_requests_bypass_the_proxy_of_the_environment(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = RawServer(sent(b"I am a proxy", status="403 Forbidden"))
    server = RawServer(sent(RIGHT, "Connection: close"), host)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url)
    urls = [server.url] if host != "127.0.0.1" else [server.url, server.url.replace("127.0.0.1", "localhost")]
    for url in urls:
        with RemoteReward([url], RewardSettings(url_tries=1)) as reward:
            assert reward(["qa"], ["q"], ["a"]).reward_B.tolist() == [1.0]
    assert proxy.connections == 0
    # Other hosts are reached through the proxy.
    with (
        RemoteReward(["http://reward.invalid/score"], RewardSettings(url_tries=1)) as reward,
        pytest.raises(RewardError, match=re.escape("I am a proxy")),
    ):
        reward(["qa"], ["q"], ["a"])
    assert proxy.connections == 1
    for each in (proxy, server):
        each.close()


def test_closing_ends_a_request_under_way() -> None:
    server = RawServer(dripping(HEAD, lambda _: b"X: y\r\n"))
    reward = RemoteReward([server.url], RewardSettings(url_tries=1))
    raised: list[BaseException] = []

    def asked() -> None:
        try:
            reward(["qa"], ["q"], ["a"])
        except RewardError as error:
            raised.append(error)

    asking = threading.Thread(target=asked)
    asking.start()
    deadline = time.monotonic() + GUARD_S
    while not server.connections and time.monotonic() < deadline:
        time.sleep(0.01)
    reward.close()
    asking.join(GUARD_S)
    assert not asking.is_alive() and len(raised) == 1
    server.close()
    reward.close()
