"""Rewards from HTTP servers: requests, retries, and errors that are not retried."""

import gzip
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from components.net.http_client import MOST_BYTES
from components.rewards.base import RewardOutput, RewardSettings
from components.rewards.errors import RewardError
from plugins.remote_reward.scorer import RefusedError, RemoteReward
from tests.components.helpers.closed_port import closed_port
from tests.components.helpers.reward_server import Answer, Handler, Request, RewardServer
from tests.messages import says

GUARD_S = 120
"""Number of seconds after which a hanging test continues and fails."""
Start = Callable[[Callable[[Request, int], Answer]], RewardServer]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[RewardServer] = []

    def start_one(answer: Callable[[Request, int], Answer]) -> RewardServer:
        servers.append(RewardServer(answer))
        return servers[-1]

    yield start_one
    for server in servers:
        server.shutdown()
        server.server_close()


def right(request: Request, number: int) -> Answer:
    """Reply with the label of each response as its reward."""
    return 200, {"rewards": request["labels"]}, {}


def failing_first(times: int, status: int, headers: dict[str, str] | None = None) -> Callable[[Request, int], Answer]:
    return lambda request, number: right(request, number) if number > times else (status, b"busy", headers or {})


@pytest.fixture
def refused_url() -> Iterator[str]:
    """Return a URL at which no server listens."""
    with closed_port() as port:
        yield f"http://127.0.0.1:{port}/score"


def ask(urls: list[str], count: int, *, pause_s: float = 0.01, **settings: float) -> RewardOutput:
    """Return the rewards of `count` responses with the labels 0, 1, ..."""
    with RemoteReward(urls, RewardSettings(**settings), pause_s=pause_s) as reward:  # pyright: ignore[reportArgumentType]
        return reward([f"q{i}a{i}" for i in range(count)], [f"q{i}" for i in range(count)], list(range(count)))


def test_a_server_gets_query_prompts_and_labels_and_its_full_reply_is_read(start: Start) -> None:
    server = start(
        lambda request, number: (
            200,
            {"rewards": [[1], [2]], "scores": [0, 0.5], "extra_logs": {"a": 7, "b": [1, 2]}},
            {},
        )
    )
    output = ask([server.url], 2)
    assert server.requests == [{"query": ["q0a0", "q1a1"], "prompts": ["q0", "q1"], "labels": [0, 1]}]
    assert (output.reward_B.tolist(), output.score_B.tolist()) == ([1.0, 2.0], [0.0, 0.5])
    assert {name: value.tolist() for name, value in output.logs.items()} == {"a": [7.0, 7.0], "b": [1.0, 2.0]}
    assert output.failures == {}


def test_requests_have_the_batch_size_and_rewards_keep_their_order(start: Start) -> None:
    servers = [start(right), start(right)]
    output = ask([server.url for server in servers], 23, url_batch_size=5)
    assert output.reward_B.tolist() == [float(place) for place in range(23)]
    sizes = sorted(len(request["query"]) for server in servers for request in server.requests)
    assert sizes == [3, 5, 5, 5, 5]
    assert ask([servers[0].url], 0).reward_B.shape == (0,)


def test_a_slow_server_gets_fewer_requests(start: Start) -> None:
    others_are_done = threading.Event()

    def slow(request: Request, number: int) -> Answer:
        assert others_are_done.wait(GUARD_S)
        return right(request, number)

    def quick(request: Request, number: int) -> Answer:
        if number == 19:
            others_are_done.set()
        return right(request, number)

    slow_one = start(slow)
    quick_one = start(quick)
    assert ask([slow_one.url, quick_one.url], 20, url_batch_size=1).reward_B.tolist() == [float(i) for i in range(20)]
    assert len(slow_one.requests) <= 1
    assert len(slow_one.requests) + len(quick_one.requests) == 20


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_request_to_a_busy_server_is_retried_and_each_try_is_logged(
    start: Start, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(failing_first(2, status))
    with caplog.at_level(logging.WARNING):
        assert ask([server.url], 2).reward_B.tolist() == [0.0, 1.0]
    assert len(caplog.records) == 2
    for number, record in enumerate(caplog.records, 1):
        assert re.search(says(server.url, status, "'busy'", f"{number} of 5"), record.getMessage())


def test_pauses_double_and_retry_after_extends_them(start: Start) -> None:
    # Pauses of 0.1 s and 0.2 s, each reduced by at most a quarter.
    began = time.monotonic()
    ask([start(failing_first(2, 503)).url], 1, pause_s=0.1)
    assert time.monotonic() - began >= 0.75 * 0.3
    began = time.monotonic()
    ask([start(failing_first(1, 429, {"Retry-After": "1"})).url], 1)
    assert time.monotonic() - began >= 1.0
    for unreadable in ("soon", "Wed, 21 Oct 2015 07:28:00 GMT"):
        ask([start(failing_first(1, 503, {"Retry-After": unreadable})).url], 1)


def test_another_server_replaces_one_that_refuses(start: Start, refused_url: str) -> None:
    server = start(right)
    output = ask([refused_url, server.url], 12, url_batch_size=2, url_tries=2)
    assert output.reward_B.tolist() == [float(place) for place in range(12)]
    assert len(server.requests) == 6


def test_a_broken_connection_is_retried(start: Start) -> None:
    # The first response is shorter than its Content-Length.
    server = start(lambda r, n: right(r, n) if n > 1 else (200, b"{", {"Content-Length": "9", "Connection": "close"}))
    assert ask([server.url], 2).reward_B.tolist() == [0.0, 1.0]


def test_after_the_last_try_an_error_gives_the_number_of_tries_and_seconds(refused_url: str) -> None:
    with pytest.raises(RewardError, match=says(refused_url, "3 tries", "ConnectError")) as caught:
        ask([refused_url], 3, url_tries=3)
    assert re.search(r"\b\d+\.\d s\b", str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("trickle", [False, True])
def test_a_hanging_or_slow_server_is_abandoned_after_its_timeout(start: Start, trickle: bool) -> None:
    ended = threading.Event()

    def hang(request: Request, number: int) -> Answer:
        ended.wait(0 if trickle else GUARD_S)
        return 200, b"", {"Content-Length": "1000000"}

    server = start(hang)
    if trickle:
        # One byte every 0.1 s never exceeds the timeout between two bytes.
        server.RequestHandlerClass = type("Trickling", (Handler,), {"end_headers": trickling(ended)})
    with pytest.raises(RewardError, match=says(server.url, "2 tries", "ReadTimeout")):
        ask([server.url], 1, url_tries=2, url_timeout_s=0.4)
    ended.set()


def trickling(ended: threading.Event) -> Callable[[Handler], None]:
    def end_headers(handler: Handler) -> None:
        BaseHTTPRequestHandler.end_headers(handler)
        try:
            while not ended.wait(0.1):
                handler.wfile.write(b" ")
        except ConnectionError:
            handler.close_connection = True

    return end_headers


@pytest.mark.parametrize(
    ("status", "answer", "facts"),
    [
        (404, b"no such page", ["'no such page'"]),
        (422, b"x" * 999, [f"'{'x' * 200}'"]),
        (307, b"", ["''"]),
        (200, b"<html>", ["JSON", "'<html>'"]),
        (200, b'{"rewards":' * 50_000, ["JSON", '\'{"rewards":']),
        (200, {"rewards": [1.0]}, ["'rewards'", "(1,)", "2 queries"]),
    ],
)
def test_a_permanent_error_is_not_retried(start: Start, status: int, answer: Any, facts: list[str]) -> None:
    server = start(lambda request, number: (status, answer, {}))
    with pytest.raises(ValueError, match=says(server.url, f"status {status}", *facts)):
        ask([server.url], 2)
    assert len(server.requests) == 1


def test_an_endless_reply_is_read_up_to_the_size_limit(start: Start) -> None:
    bomb = gzip.compress(b" " * 2 * MOST_BYTES)  # the received bytes are fewer than the decompressed ones
    server = start(lambda request, number: (200, bomb, {"Content-Encoding": "gzip"}))
    with pytest.raises(RefusedError, match=says(server.url, "64 MB")):
        ask([server.url], 1)
    assert len(server.requests) == 1


def test_the_first_error_ends_a_batch_while_other_requests_run(start: Start) -> None:
    ended = threading.Event()
    answered: list[int] = []

    def hang(request: Request, number: int) -> Answer:
        ended.wait(GUARD_S)
        answered.append(number)
        return right(request, number)

    with pytest.raises(ValueError, match="404"):
        ask([start(hang).url, start(failing_first(99, 404)).url], 20, url_batch_size=1)
    assert answered == []
    ended.set()


def test_secrets_in_a_url_are_sent_to_the_server_and_hidden_in_messages(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(failing_first(1, 500))
    url = server.url.replace("http://", "http://me:hidden@") + "?key=hidden"
    with caplog.at_level(logging.WARNING, logger="components"):
        assert ask([url], 1).reward_B.tolist() == [0.0]
    assert re.search(says(server.url, 500), caplog.text)
    server.response = failing_first(99, 500)
    with pytest.raises(RewardError) as caught:
        ask([url], 1, url_tries=2)
    assert "hidden" not in caplog.text + str(caught.value)


def test_a_batch_that_json_cannot_represent_and_misfitting_columns_are_refused(start: Start) -> None:
    with RemoteReward([start(right).url], RewardSettings()) as reward:
        with pytest.raises(ValueError, match=says("JSON", "label")):
            reward(["a"], ["a"], [object()])
        with pytest.raises(ValueError, match=says("1 queries", "2 labels")):
            reward(["a"], ["a"], [1, 2])


def test_an_extra_log_missing_in_some_replies_is_nan_there(start: Start) -> None:
    server = start(lambda request, number: (200, {"rewards": [1], "extra_logs": {"x": 1} if number == 1 else {}}, {}))
    assert ask([server.url], 2, url_batch_size=1).logs["x"].isnan().tolist() == [False, True]


class TokenHandler(Handler):
    """Reply only to requests with the token."""

    def do_POST(self) -> None:
        if self.headers["Authorization"] == "Bearer s3cret":
            return super().do_POST()
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None


def test_a_token_of_the_environment_is_sent_and_never_shown(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(right)
    server.RequestHandlerClass = TokenHandler
    refused = says(server.url, 401, "TROUPE_REWARD_TOKEN")
    monkeypatch.delenv("TROUPE_REWARD_TOKEN", raising=False)
    with pytest.raises(RefusedError, match=refused):
        ask([server.url], 2)
    monkeypatch.setenv("TROUPE_REWARD_TOKEN", "wrong")
    with pytest.raises(RewardError, match=refused) as caught:
        ask([server.url], 2)
    assert "wrong" not in str(caught.value)
    monkeypatch.setenv("TROUPE_REWARD_TOKEN", "s3cret\n")  # as in a file, with a line break
    assert ask([server.url], 2).reward_B.tolist() == [0.0, 1.0]
    # The library would show a value that no header can contain, so it is rejected before.
    monkeypatch.setenv("TROUPE_REWARD_TOKEN", "s3c\nret")
    with pytest.raises(ValueError, match="TROUPE_REWARD_TOKEN") as shown:
        ask([server.url], 2)
    assert "s3c" not in str(shown.value) + caplog.text
