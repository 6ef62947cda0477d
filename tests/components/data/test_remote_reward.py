"""Rewards from HTTP servers: what is sent, what is tried again, and what is not."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from components.data.remote_reward import RefusedError, RemoteReward
from components.data.rewards import RewardError, RewardOutput, RewardSettings
from tests.components.data.reward_server import Answer, Handler, Request, RewardServer

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
    """The label is the reward."""
    return 200, {"rewards": request["labels"]}, {}


def failing_first(times: int, status: int, headers: dict[str, str] | None = None) -> Callable[[Request, int], Answer]:
    return lambda request, number: right(request, number) if number > times else (status, b"busy", headers or {})


def refused_url() -> str:
    """A URL at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/score"


def ask(urls: list[str], count: int, *, pause_s: float = 0.01, **settings: float) -> RewardOutput:
    """Rewards of `count` answers whose labels are 0, 1, ..."""
    with RemoteReward(urls, RewardSettings(**settings), pause_s=pause_s) as reward:  # pyright: ignore[reportArgumentType]
        return reward([f"q{i}a{i}" for i in range(count)], [f"q{i}" for i in range(count)], list(range(count)))


def test_a_server_gets_query_prompts_and_labels_and_its_whole_answer_is_read(start: Start) -> None:
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


def test_requests_hold_a_batch_size_each_and_rewards_keep_their_order(start: Start) -> None:
    servers = [start(right), start(right)]
    output = ask([server.url for server in servers], 23, url_batch_size=5)
    assert output.reward_B.tolist() == [float(place) for place in range(23)]
    sizes = sorted(len(request["query"]) for server in servers for request in server.requests)
    assert sizes == [3, 5, 5, 5, 5]
    assert ask([servers[0].url], 0).reward_B.shape == (0,)


def test_a_slow_server_gets_fewer_requests(start: Start) -> None:
    def slow(request: Request, number: int) -> Answer:
        time.sleep(1)
        return right(request, number)

    slow_one, quick_one = start(slow), start(right)
    assert ask([slow_one.url, quick_one.url], 20, url_batch_size=1).reward_B.tolist() == [float(i) for i in range(20)]
    assert len(slow_one.requests) < 5 < len(quick_one.requests)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again_and_each_try_is_logged(
    start: Start, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(failing_first(2, status))
    with caplog.at_level(logging.WARNING):
        assert ask([server.url], 2).reward_B.tolist() == [0.0, 1.0]
    assert [record.message for record in caplog.records] == [
        f"reward server {server.url}: HTTP status {status}: 'busy' (try {number} of 5)" for number in (1, 2)
    ]


def test_pauses_double_and_retry_after_makes_them_longer(start: Start) -> None:
    # 0.1 s and 0.2 s, each at least three quarters of that.
    began = time.monotonic()
    ask([start(failing_first(2, 503)).url], 1, pause_s=0.1)
    assert time.monotonic() - began >= 0.75 * 0.3
    began = time.monotonic()
    ask([start(failing_first(1, 429, {"Retry-After": "1"})).url], 1)
    assert time.monotonic() - began >= 1.0
    for unreadable in ("soon", "Wed, 21 Oct 2015 07:28:00 GMT"):
        ask([start(failing_first(1, 503, {"Retry-After": unreadable})).url], 1)


def test_another_server_takes_over_from_one_that_refuses(start: Start) -> None:
    server = start(right)
    output = ask([refused_url(), server.url], 12, url_batch_size=2, url_tries=2)
    assert output.reward_B.tolist() == [float(place) for place in range(12)]
    assert len(server.requests) == 6


def test_a_connection_that_breaks_is_tried_again(start: Start) -> None:
    # The first answer is shorter than it says.
    server = start(lambda r, n: right(r, n) if n > 1 else (200, b"{", {"Content-Length": "9", "Connection": "close"}))
    assert ask([server.url], 2).reward_B.tolist() == [0.0, 1.0]


def test_when_all_tries_are_used_up_the_run_stops_and_says_how_long_it_tried() -> None:
    url = refused_url()
    with pytest.raises(RewardError) as caught:
        ask([url], 3, url_tries=3)
    message = str(caught.value)
    assert message.startswith(f"reward server {url} gave no answer in 3 tries over 0.")
    assert "the last: ConnectError: " in message
    assert "\n" not in message


@pytest.mark.parametrize("trickle", [False, True])
def test_a_server_that_hangs_or_trickles_is_given_up_after_its_time(start: Start, trickle: bool) -> None:
    ended = threading.Event()

    def hang(request: Request, number: int) -> Answer:
        ended.wait(0 if trickle else 60)
        return 200, b"", {"Content-Length": "1000000"}

    server = start(hang)
    if trickle:
        # A byte every 0.1 s is never too long between two of them.
        server.RequestHandlerClass = type("Trickling", (Handler,), {"end_headers": trickling(ended)})
    began = time.monotonic()
    with pytest.raises(RewardError, match="the last: ReadTimeout: "):
        ask([server.url], 1, url_tries=2, url_timeout_s=0.4)
    assert time.monotonic() - began < 20
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
    ("status", "answer", "message"),
    [
        (404, b"no such page", "answered with HTTP status 404: 'no such page'; set the reward to a URL"),
        (422, b"x" * 999, f"answered with HTTP status 422: '{'x' * 200}'; set"),
        (307, b"", "answered with HTTP status 307: ''"),
        (200, b"<html>", "answered with HTTP status 200 and no JSON: '<html>'"),
        (200, [1.0, 2.0], "HTTP status 200, but returned a list; return a dict with 'rewards'"),
        (200, {"rewards": [1.0]}, r"but 'rewards' has the shape \(1,\); give one number for each of the 2 queries"),
        (200, {"rewards": [1.0, float("nan")]}, "but 'rewards' holds nan; return finite numbers"),
        (200, {"rewards": [1.0, None]}, "but 'rewards' must be numbers, found a NoneType"),
    ],
)
def test_an_answer_that_another_try_would_not_mend_is_refused_at_once(
    start: Start, status: int, answer: Any, message: str
) -> None:
    server = start(lambda request, number: (status, answer, {}))
    with pytest.raises(ValueError, match=f"^reward server {server.url} .*{message}"):
        ask([server.url], 2)
    assert len(server.requests) == 1


def test_the_first_error_ends_a_batch_that_others_still_work_at(start: Start) -> None:
    ended = threading.Event()

    def hang(request: Request, number: int) -> Answer:
        ended.wait(60)
        return right(request, number)

    began = time.monotonic()
    with pytest.raises(ValueError, match="HTTP status 404"):
        ask([start(hang).url, start(failing_first(99, 404)).url], 20, url_batch_size=1)
    assert time.monotonic() - began < 20
    ended.set()


def test_secrets_in_a_url_reach_the_server_and_no_message(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start(failing_first(1, 500))
    url = server.url.replace("http://", "http://me:hidden@") + "?key=hidden"
    with caplog.at_level(logging.WARNING, logger="components"):
        assert ask([url], 1).reward_B.tolist() == [0.0]
    assert f"reward server {server.url}: HTTP status 500" in caplog.text
    server.answer = failing_first(99, 500)
    with pytest.raises(RewardError) as caught:
        ask([url], 1, url_tries=2)
    assert "hidden" not in caplog.text + str(caught.value)


def test_a_batch_that_json_cannot_hold_is_refused_and_columns_must_fit(start: Start) -> None:
    with RemoteReward([start(right).url], RewardSettings()) as reward:
        with pytest.raises(ValueError, match=r"cannot be written as JSON .*; set the label key to text or numbers"):
            reward(["a"], ["a"], [object()])
        with pytest.raises(ValueError, match="1 queries came with 2 labels"):
            reward(["a"], ["a"], [1, 2])


def test_a_log_that_comes_in_some_answers_only_is_refused(start: Start) -> None:
    server = start(lambda request, number: (200, {"rewards": [1], "extra_logs": {"x": 1} if number == 1 else {}}, {}))
    with pytest.raises(ValueError, match=r"extra_logs\['x'\] came for some answers and not for answer 1"):
        ask([server.url], 2, url_batch_size=1)


class TokenHandler(Handler):
    """Answers whoever brings the token."""

    def do_POST(self) -> None:
        if self.headers["Authorization"] == "Bearer s3cret":
            return super().do_POST()
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None


def test_a_server_that_wants_a_token_gets_that_of_the_environment_which_nobody_is_shown(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(right)
    server.RequestHandlerClass = TokenHandler
    refused = f"^reward server {server.url} answered with HTTP status 401: ''; set TROUPE_REWARD_TOKEN to the server's"
    monkeypatch.delenv("TROUPE_REWARD_TOKEN", raising=False)
    with pytest.raises(RefusedError, match=refused):
        ask([server.url], 2)
    monkeypatch.setenv("TROUPE_REWARD_TOKEN", "wrong")
    with pytest.raises(RewardError, match=refused) as caught:
        ask([server.url], 2)
    assert "wrong" not in str(caught.value)
    monkeypatch.setenv("TROUPE_REWARD_TOKEN", "s3cret\n")  # as a file holds it
    assert ask([server.url], 2).reward_B.tolist() == [0.0, 1.0]
    # What no header can hold would be shown by the library that refuses it.
    monkeypatch.setenv("TROUPE_REWARD_TOKEN", "s3c\nret")
    with pytest.raises(ValueError, match="TROUPE_REWARD_TOKEN holds characters that no HTTP header can") as shown:
        ask([server.url], 2)
    assert "s3c" not in str(shown.value) + caplog.text
