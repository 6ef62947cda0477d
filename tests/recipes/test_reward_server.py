"""The HTTP server of the reward model: correct scores, clear errors, and no lost request at shutdown."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from components.batch import Batch
from components.data.preferences import scored_tokens
from components.data.text import TextEncoder, load_tokenizer
from components.models.reward_model import RewardModel, note_statistics
from components.models.value_model import ValueModel
from components.rewards.base import RewardSettings
from plugins.demo.tasks import get_task
from plugins.demo.tiny_model import task_tokenizer, tiny_model
from plugins.remote_reward.scorer import RemoteReward
from recipes.reward_model.config import ScorerOptions
from recipes.reward_model.serve import ServeConfig, main, make_app
from recipes.reward_model.service import QueueFull, ScoringService
from tests.messages import says

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-the-test"
MAX_LEN = 24
GUARD_S = 300
"""Timeout against a hang in seconds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained reward model of the sort task, with a head that gives different scores to different texts."""
    path = tmp_path_factory.mktemp("reward_model")
    tokenizer = task_tokenizer(get_task("sort"))
    model = ValueModel(tiny_model(tokenizer, seed=3).model)
    model.score.weight.data *= 100
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    note_statistics(path, mean=0.5, std=2.0)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, float]:
    """Texts and their scores, each scored alone."""
    task = get_task("sort")
    texts = [row["prompt"] + row[key] for row in task.pairs(60, seed=1) for key in ("chosen", "rejected")]
    model, encoder = RewardModel(folder), TextEncoder(load_tokenizer(folder))
    rows = {text: scored_tokens(text, encoder) for text in texts}
    return {text: float(model.score(Batch.from_rows({"tokens": [row]}))) for text, row in rows.items()}


class Server:
    """The command, as a user starts it."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        command = [sys.executable, "-P", "-m", "recipes.reward_model.serve", f"model.path={folder}"]
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--max_text_tokens", str(MAX_LEN), *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"http://\S+(?=,)", line)
        assert match is not None, line
        self.url, self.said = match[0], line

    def get(self, name: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url.replace("get_reward", name), headers=headers, timeout=GUARD_S)

    def post(self, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url, content=content, headers=headers, timeout=GUARD_S)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=GUARD_S)


LIMITS = ("--max_request_mb", "0.1", "--max_text_mb", "0.05", "--max_values", "8000", "--queue_size", "3000")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder, *LIMITS, TROUPE_REWARD_TOKEN=TOKEN)
    yield server
    server.stop()


AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}


@pytest.mark.full
def test_scores_do_not_depend_on_the_other_texts_of_a_batch(server: Server, expected: dict[str, float]) -> None:
    texts = list(expected)

    def ask(number: int) -> None:
        batch = [texts[(number * 7 + place) % len(texts)] for place in range(number % 9)]
        response = server.post({"query": batch}, **AUTHORIZATION).json()
        assert response["rewards"] == pytest.approx([expected[text] for text in batch], abs=1e-5)
        assert response["scores"] == response["rewards"]
        assert response["extra_logs"] == {"truncated": [0.0] * len(batch)}

    with ThreadPoolExecutor(16) as clients:
        list(clients.map(ask, range(120)))
    metrics = server.get("metrics", **AUTHORIZATION).text
    # 120 requests of 0 to 8 texts: 13 complete cycles of 36 texts, and 0 + 1 + 2.
    assert "troupe_reward_texts_total 471.0" in metrics
    passes = re.search(r"troupe_reward_pass_texts_count (\S+)", metrics)
    assert passes is not None and float(passes[1]) < 106, "requests never shared a pass"  # 106 of them have a text


@pytest.mark.full
def test_an_end_token_in_the_text_is_not_duplicated(server: Server, expected: dict[str, float]) -> None:
    text, score = next(iter(expected.items()))
    response = server.post({"query": [text + "<eos>", text + "<eos>\n", text]}, **AUTHORIZATION).json()
    assert response["rewards"] == pytest.approx([score] * 3, abs=1e-5)


@pytest.mark.full
def test_a_long_text_is_truncated_from_the_left_and_counted(server: Server, folder: Path) -> None:
    long = "ponmlkjihgfedcba>" * 3 + "abcde"
    response = server.post({"query": [long, "dbcaf>abcdf"]}, **AUTHORIZATION).json()
    assert response["extra_logs"]["truncated"] == [1.0, 0.0]
    rows = scored_tokens(long, TextEncoder(load_tokenizer(folder)))[-MAX_LEN:]
    alone = RewardModel(folder).score(Batch.from_rows({"tokens": [rows]}))
    assert response["rewards"][0] == pytest.approx(float(alone), abs=1e-5)
    assert "troupe_reward_truncated_total 1.0" in server.get("metrics", **AUTHORIZATION).text


@pytest.mark.full
@pytest.mark.parametrize(
    ("body", "status", "facts"),
    [
        (b"nonsense", 422, ["body", "JSON"]),
        (b"[" * 5000, 422, ["body", "JSON"]),
        ([], 422, ["body", "dictionary"]),
        ({"prompts": ["a"]}, 422, ["query", "required"]),
        ({"query": "dbcaf>"}, 422, ["query", "list"]),
        ({"query": ["dbcaf>", 3]}, 422, ["query.1", "string"]),
        ({"query": ["dbcaf>"], "labels": []}, 422, ["1 in query", "0 in labels"]),
        ({"query": ["a"] * 3001}, 422, [3001, 3000]),
        ({"query": ["dbcaf>", "no?"]}, 422, ["query 1", "tokenizer"]),
        (b'{"query": ["\\ud800"]}', 422, ["query 0", "utf-8"]),
        ({"query": ["a" * 100_000]}, 413, ["body", "0.1 MB", "max_request_mb"]),
        ({"query": ["a" * 60_000]}, 413, ["text", "0.05 MB", "max_text_mb"]),
        (b'{"query": [' + b"1," * 9000 + b"1]}", 413, ["values", "8000", "max_values"]),
        (b'{"query": [' + b"[]," * 9000 + b"[]]}", 413, ["values", "8000", "max_values"]),
        ({"query": [1] * 7000}, 422, ["query.0", "string"]),
    ],
)
def test_an_invalid_request_is_rejected_with_the_reason(
    server: Server, body: Any, status: int, facts: list[object]
) -> None:
    response = server.post(body, **AUTHORIZATION)
    assert response.status_code == status
    assert re.search(says(*facts), response.json()["detail"])


@pytest.mark.parametrize("token", ["", "  "])
def test_an_empty_access_token_is_rejected(token: str) -> None:
    with pytest.raises(ValueError, match=says("token", "empty")):
        ServeConfig(model=ScorerOptions(path="model"), token=token)


@pytest.mark.full
def test_requests_without_the_access_token_are_rejected(server: Server) -> None:
    assert TOKEN not in server.said and "with a token" in server.said
    for headers in ({}, {"Authorization": TOKEN}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer é"}):
        sent = {name.encode(): value.encode() for name, value in headers.items()}
        response = httpx.post(server.url, json={"query": []}, headers=sent, timeout=GUARD_S)
        assert (response.status_code, TOKEN in response.text) == (401, False)
    assert server.get("metrics").status_code == 401
    assert server.get("health").json()["status"] == "ok"
    assert server.post({"query": []}, **AUTHORIZATION).json()["rewards"] == []


@pytest.mark.full
def test_900_incomplete_requests_block_no_client_and_time_out(folder: Path) -> None:
    server = Server(folder, "--grace_s", "3")
    try:
        descriptors = Path(f"/proc/{server.process.pid}/fd")
        before = len(list(descriptors.iterdir()))
        address = httpx.URL(server.url)
        clients = [socket.create_connection((address.host, address.port or 0), timeout=GUARD_S) for _ in range(900)]
        for client in clients:
            client.sendall(b"POST /get_reward HTTP/1.1\r\nHost: a\r\nContent-Le")
        assert server.post({"query": ["dbcaf>abcdf"]}).status_code == 200
        for client in clients:
            with client, suppress(ConnectionResetError):
                assert client.recv(100) == b""
        deadline = time.monotonic() + GUARD_S
        while len(list(descriptors.iterdir())) > before + 90:  # it closes them a moment later
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        server.stop()


def test_the_server_listens_on_this_machine_only() -> None:
    assert ServeConfig(model=ScorerOptions(path="x")).host == "127.0.0.1"


@pytest.mark.full
def test_requests_in_progress_are_answered_at_shutdown(folder: Path, expected: dict[str, float]) -> None:
    server = Server(folder, "--normalize", "--max_tokens", "40", "--grace_s", str(GUARD_S))
    body = json.dumps({"query": list(expected)}).encode()
    try:
        address = httpx.URL(server.url)
        client = HTTPConnection(address.host, address.port or 0, timeout=GUARD_S)
        client.putrequest("POST", address.path)
        client.putheader("Content-Length", str(len(body)))
        client.putheader("Expect", "100-continue")
        client.endheaders()
        # The server sends this line when it begins to read the body. From then on it admits no further client.
        go_on = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert client.sock.recv(len(go_on), socket.MSG_WAITALL) == go_on
        server.process.send_signal(signal.SIGTERM)
        while takes_connections(address):
            time.sleep(0.01)
        client.send(body)
        response = json.loads(client.getresponse().read())
        client.close()
        out, _ = server.process.communicate(timeout=GUARD_S)
    finally:
        server.stop()
    assert (server.process.returncode, out) == (0, "serve: stopped\n")
    # The config has mean 0.5 and standard deviation 2.
    assert response["rewards"] == pytest.approx([(score - 0.5) / 2 for score in expected.values()], abs=1e-5)


def takes_connections(address: httpx.URL) -> bool:
    """True if a process accepts connections at this address."""
    try:
        socket.create_connection((address.host, address.port or 0), timeout=GUARD_S).close()
    except ConnectionRefusedError:
        return False
    return True


class Held(RewardModel):
    """The model. Each pass waits until it is released."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.began, self.gate = threading.Event(), threading.Semaphore(0)

    def score(self, batch: Batch) -> Any:
        self.began.set()
        assert self.gate.acquire(timeout=GUARD_S)
        return super().score(batch)


def held_service(folder: Path) -> tuple[ScoringService, Held]:
    model = Held(folder)
    return ScoringService(model, load_tokenizer(folder), max_len=MAX_LEN, max_tokens=60, queue_size=8), model


async def until(done: Callable[[], bool]) -> None:
    """Wait for an effect of other threads."""
    async with asyncio.timeout(GUARD_S):
        while not done():
            await asyncio.sleep(0.01)


def waiting_in(service: ScoringService) -> float | None:
    return service.metrics.registry.get_sample_value("troupe_reward_waiting")


def test_waiting_requests_share_a_forward_pass_up_to_the_token_budget(folder: Path, expected: dict[str, float]) -> None:
    texts = [text for text in expected if len(text) == 11][:9]  # 12 tokens each, with the end token

    async def run_episodes() -> list[float]:
        service, model = held_service(folder)
        async with service:
            first = asyncio.create_task(service.score(texts[:1]))
            await until(model.began.is_set)
            others = [asyncio.create_task(service.score([text])) for text in texts[1:]]
            await until(lambda: waiting_in(service) == 8)
            model.gate.release(10)
            scores = [await first, *[await other for other in others]]
            registry, name = service.metrics.registry, "troupe_reward_pass_texts_bucket"
            passes = [registry.get_sample_value(name, {"le": up_to}) for up_to in ("1.0", "4.0", "8.0")]
            # Batches within 60 tokens: one text alone, then 5 texts, then 3.
            assert passes == [1, 2, 3]
            return [score[0].reward for score in scores]

    assert asyncio.run(run_episodes()) == pytest.approx([expected[text] for text in texts], abs=1e-5)


def test_a_full_queue_rejects_new_requests_and_answers_queued_ones(folder: Path, expected: dict[str, float]) -> None:
    texts = list(expected)

    async def run_episodes() -> None:
        service, model = held_service(folder)
        config = ServeConfig(model=ScorerOptions(path=str(folder)), max_text_tokens=MAX_LEN, queue_size=8)
        transport = httpx.ASGITransport(make_app(service, config))
        async with service, httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            waiting = asyncio.create_task(service.score(texts[:5]))
            await until(model.began.is_set)
            more = asyncio.create_task(service.score(texts[5:10]))
            await until(lambda: waiting_in(service) == 5)
            with pytest.raises(QueueFull, match=says(8)):
                await service.score(texts[:4])
            refused = await client.post("/get_reward", json={"query": texts[:4]})
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            model.gate.release(20)
            scores = [one.reward for one in [*await waiting, *await more]]
            assert scores == pytest.approx([expected[text] for text in texts[:10]], abs=1e-5)

    asyncio.run(run_episodes())


def test_requests_of_disconnected_clients_are_not_scored(folder: Path) -> None:
    async def run_episodes() -> None:
        service, model = held_service(folder)
        app = make_app(service, ServeConfig(model=ScorerOptions(path=str(folder))))
        sent: list[dict[str, Any]] = []
        body = json.dumps({"query": ["dbcaf>abcdf"] * 8}).encode()
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not sent and not received:
                received.append(True)
                return {"type": "http.request", "body": body}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        received: list[bool] = []
        scope = {"type": "http", "method": "POST", "path": "/get_reward", "headers": [], "query_string": b""}
        async with service:
            request = asyncio.create_task(app(scope, receive, send))
            await until(model.began.is_set)
            assert waiting_in(service) == 3  # 5 texts of 12 tokens each are in the pass that is held
            left.set()
            await request
            assert sent[0]["status"] == 499
            # The space of a disconnected client is free at once.
            others = asyncio.create_task(service.score(["dbcaf>abcdf"] * 8))
            await until(lambda: waiting_in(service) == 8)
            model.gate.release(9)
            assert len(await others) == 8

    asyncio.run(run_episodes())


@pytest.mark.full
def test_the_reward_client_of_the_recipes_gets_its_scores(folder: Path, expected: dict[str, float]) -> None:
    server = Server(folder)
    try:
        texts = list(expected)[:50]
        with RemoteReward([server.url], RewardSettings(url_batch_size=7)) as reward:
            rewards = reward(texts, [text[:6] for text in texts], [""] * 50)
    finally:
        server.stop()
    assert rewards.reward_B.tolist() == pytest.approx([expected[text] for text in texts], abs=1e-5)
    assert rewards.logs["truncated"].tolist() == [0.0] * 50


def test_invalid_options_are_reported_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(folder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        model_option = ("--reward_pretrain", path)
        cases: dict[tuple[str, ...], list[object]] = {
            (): ["model.path"],
            ("--reward_pretrain", str(tmp_path)): [tmp_path],
            (*model_option, "--port", port): ["host=127.0.0.1", f"port={port}"],
            (*model_option, "--port", "0", "--max_len", "4096"): ["max_len=4096", 512],
            (f"model.path={path}", "max_text_tokens=4096"): ["max_text_tokens=4096", 512],
            (*model_option, "--port", "70000"): ["port", 70000, 65535],
            (*model_option, "--queue_size", "0"): ["queue_size=0"],
            (*model_option, "--host", "no.such.host"): ["host=no.such.host", "port=5000"],
            (*model_option, "--token", "é"): ["token", "HTTP header"],
        }
        for options, facts in cases.items():
            assert main(list(options)) == 2
            said = capsys.readouterr().err
            assert re.search(says(*facts), said)
            assert (said.startswith("serve: "), said.count("\n")) == (True, 1)
