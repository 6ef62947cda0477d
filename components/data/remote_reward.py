"""Rewards from HTTP servers.

    POST {"query": [...], "prompts": [...], "labels": [...]}
    ->   {"rewards": [...], "scores": [...], "extra_logs": {"name": [...]}}

"scores" and "extra_logs" may be missing; an entry of "extra_logs" may be one number. One thread for each server
takes requests from a common queue, so that a slow server gets fewer. What a new try may mend is tried again, on the
next server if there are several; nothing is ever replaced by a made-up reward. Servers that ask for a bearer token get
the one in the environment variable TROUPE_REWARD_TOKEN.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx

from components.data.rewards import (
    Columns,
    Responses,
    RewardError,
    RewardOutput,
    RewardSettings,
    RewardSource,
    in_threads,
    join_columns,
    read_columns,
)
from components.heartbeat import beat

TOKEN = "TROUPE_REWARD_TOKEN"
UNAUTHORIZED = 401
TOO_MANY_REQUESTS = 429
LONGEST_PAUSE_S = 10.0
"""The longest wait between two tries, whatever a server asks for with Retry-After."""

MOST_BYTES = 2**26
"""Of a response, unpacked."""

_log = logging.getLogger(__name__)


class RefusedError(RewardError, ValueError):
    """A server answered what no new try would change; once somebody has mended it, a run can continue."""


class RemoteReward(RewardSource):
    """Servers that all compute the same reward."""

    def __init__(self, urls: Sequence[str], settings: RewardSettings, *, pause_s: float = 0.5) -> None:
        """Nothing is sent yet. `pause_s` comes before the second try and doubles with each further one.

        Raises ValueError for a token that no header can hold.
        """
        self.source = f"reward server {', '.join(map(_shown, urls))}"
        self._urls = list(urls)
        self._settings = settings
        self._pause_s = pause_s
        # Not the module's generator: its state belongs to whoever has set a seed.
        self._random = random.Random()
        self._client = httpx.Client(timeout=settings.url_timeout_s, headers=_authorization())

    def reward(self, given: Responses) -> RewardOutput:
        """Reward B sequences; servers find the responses in the queries.

        Raises RefusedError for an answer that a new try would not mend, RewardError when all tries are used up.
        """
        count, size = len(given.queries), self._settings.url_batch_size
        queries, prompts, labels, _, _ = given
        todo: queue.SimpleQueue[tuple[range, bytes]] = queue.SimpleQueue()
        for start in range(0, count, size):
            end = min(start + size, count)
            todo.put((range(start, end), self._body(queries[start:end], prompts[start:end], labels[start:end])))
        stop = threading.Event()
        works = [partial(self._work, first, todo, stop) for first in range(min(len(self._urls), todo.qsize()))]
        parts: list[tuple[range, Columns]] = []
        try:
            for found in in_threads(works):
                parts += found
        finally:
            # A thread in the middle of a request ends with it; nobody waits for it.
            stop.set()
        return join_columns(count, parts, {})

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _body(self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> bytes:
        try:
            return json.dumps({"query": [*queries], "prompts": [*prompts], "labels": [*labels]}).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self.source}: the batch cannot be written as JSON ({error}); set the label key to text or numbers"
            ) from error

    def _work(
        self, server: int, todo: queue.SimpleQueue[tuple[range, bytes]], stop: threading.Event
    ) -> list[tuple[range, Columns]]:
        """Send requests until there are none left; the server that answered last is asked first."""
        parts: list[tuple[range, Columns]] = []
        while not stop.is_set():
            try:
                places, body = todo.get_nowait()
            except queue.Empty:
                break
            server, columns = self._request(server, body, len(places), stop)
            beat()
            parts.append((places, columns))
        return parts

    def _request(self, server: int, body: bytes, count: int, stop: threading.Event) -> tuple[int, Columns]:
        """Get the rewards of one request, from this server or, when it fails, from the next ones."""
        began = time.monotonic()
        tries, reason = self._settings.url_tries, ""
        for attempt in range(1, tries + 1):
            url = self._urls[server % len(self._urls)]
            pause_s = min(self._pause_s * 2 ** (attempt - 1), LONGEST_PAUSE_S) * self._random.uniform(0.75, 1.25)
            try:
                response = self._post(url, body)
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if response.status_code != TOO_MANY_REQUESTS and response.status_code < 500:
                    return server, _columns(url, response, count)
                reason = f"HTTP status {response.status_code}: {_excerpt(response)}"
                pause_s = max(pause_s, _asked_pause_s(response))
            server += 1
            if attempt < tries:
                _log.warning("reward server %s: %s (try %d of %d)", _shown(url), reason, attempt, tries)
                if stop.wait(min(pause_s, LONGEST_PAUSE_S)):
                    break
        raise RewardError(
            f"{self.source} gave no result in {tries} tries over {time.monotonic() - began:.1f} s; the last: {reason}; "
            "see that it runs, can be reached from here, and is fast enough"
        )

    def _post(self, url: str, request: bytes) -> httpx.Response:
        """Send one request. httpx bounds the time between two parts of a response; here the whole is bounded, in time
        and in size.
        """
        limit_s = self._settings.url_timeout_s
        deadline = time.monotonic() + limit_s
        with self._client.stream(
            "POST", url, content=request, headers={"Content-Type": "application/json"}
        ) as response:
            body = bytearray()
            for part in response.iter_bytes():
                body += part
                if len(body) > MOST_BYTES:
                    raise RefusedError(f"reward server {_shown(url)} returned more than {MOST_BYTES >> 20} MB")
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"no whole response after {limit_s:g} s")
        # iter_bytes has already undone what this header says.
        headers = [(name, value) for name, value in response.headers.items() if name != "content-encoding"]
        return httpx.Response(response.status_code, headers=headers, content=bytes(body))


def reward_token(given: str | None = None) -> str | None:
    """The bearer token of reward servers: the one given, or the environment's; None where there is none.

    Raises ValueError for one that no header can hold, and for an empty one.
    """
    if given is not None and not given.strip():
        raise ValueError("token is empty, so that everybody would be let in; set one, or leave it out")
    token = (given or os.environ.get(TOKEN, "")).strip()
    if not (token.isascii() and token.isprintable()):  # what the HTTP library would say of it shows it
        raise ValueError(f"{TOKEN} holds characters that no HTTP header can; set it to the server's token")
    return token or None


def _authorization() -> dict[str, str]:
    token = reward_token()
    return {"Authorization": f"Bearer {token}"} if token else {}


def _columns(url: str, response: httpx.Response, count: int) -> Columns:
    """Read an answer that no new try would change."""
    where = f"reward server {_shown(url)} returned HTTP status {response.status_code}"
    if response.status_code == UNAUTHORIZED:
        raise RefusedError(f"{where}: {_excerpt(response)}; set {TOKEN} to the server's token in the environment")
    if not response.is_success:
        raise RefusedError(f"{where}: {_excerpt(response)}; set the reward to a URL that takes the request")
    try:
        answer = response.json()
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{where} and no JSON: {_excerpt(response)}") from error
    try:
        return read_columns(answer, count)
    except ValueError as error:
        raise RefusedError(f"{where}, but {error}: {_excerpt(response)}") from error


def _excerpt(response: httpx.Response) -> str:
    return repr(response.text[:200])


def _asked_pause_s(response: httpx.Response) -> float:
    """Read Retry-After; 0 where it does not say a number of seconds."""
    asked = response.headers.get("Retry-After", "").strip()
    return float(asked) if asked.isdecimal() else 0.0


def _shown(url: str) -> str:
    """The URL without what may be secret in it: a password, or a key in its query."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
