"""Rewards from HTTP servers.

    POST {"query": [...], "prompts": [...], "labels": [...]}
    ->   {"rewards": [...], "scores": [...], "extra_logs": {"name": [...]}}

"scores" and "extra_logs" may be missing; an entry of "extra_logs" may be one number. A key must not come twice, and a
body may be packed with gzip, once. A request has a deadline, `url_timeout_s`, whatever the server sends until then, and
a reply has a limit of size. Proxies of the environment are used, but not for loopback addresses. One thread for each
server takes requests from a common queue, so that a slow server gets fewer. What a new try may mend is tried again, on
the next server if there are several; nothing is ever replaced by a made-up reward. Servers that ask for a bearer token
get the one in the environment variable TROUPE_REWARD_TOKEN.
"""

from __future__ import annotations

import json
import logging
import queue
import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from components.net.http_client import HttpClient, Reply, UnreadableError
from components.process.heartbeat import beat
from components.rewards.base import (
    Columns,
    RefusedError,
    Responses,
    RewardError,
    RewardOutput,
    RewardSettings,
    RewardSource,
    in_threads,
    join_columns,
    read_columns,
)
from components.rewards.servers import TOKEN, reward_token

UNAUTHORIZED = 401
TOO_MANY_REQUESTS = 429
LONGEST_PAUSE_S = 10.0
"""The longest wait between two tries, whatever a server asks for with Retry-After."""

_log = logging.getLogger(__name__)


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
        self._client = HttpClient(_authorization())

    def reward(self, samples: Responses) -> RewardOutput:
        """Reward B sequences; servers find the responses in the queries.

        Raises RefusedError for an answer that a new try would not mend, RewardError when all tries are used up.
        """
        count, size = len(samples.queries), self._settings.url_batch_size
        queries, prompts, labels, _, _ = samples
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
                reply = self._client.post(url, body, self._settings.url_timeout_s)
            except UnreadableError as error:
                raise RefusedError(f"reward server {_shown(url)} returned {error}") from error
            except TimeoutError:
                reason = f"ReadTimeout: no whole response after {self._settings.url_timeout_s:g} s"
            except Exception as error:  # noqa: BLE001 - a library may raise anything for what a server sends
                reason = f"{type(error).__name__}: {error}"
            else:
                if reply.status != TOO_MANY_REQUESTS and reply.status < 500:
                    return server, _columns(url, reply, count)
                reason = f"HTTP status {reply.status}: {reply.excerpt()}"
                pause_s = max(pause_s, _asked_pause_s(reply))
            server += 1
            if attempt < tries:
                _log.warning("reward server %s: %s (try %d of %d)", _shown(url), reason, attempt, tries)
                if stop.wait(min(pause_s, LONGEST_PAUSE_S)):
                    break
        raise RewardError(
            f"{self.source} gave no result in {tries} tries over {time.monotonic() - began:.1f} s; the last: {reason}; "
            "see that it runs, can be reached from here, and is fast enough"
        )


def _authorization() -> dict[str, str]:
    token = reward_token()
    return {"Authorization": f"Bearer {token}"} if token else {}


def _columns(url: str, reply: Reply, count: int) -> Columns:
    """Read a reply that no new try would change."""
    where = f"reward server {_shown(url)} returned HTTP status {reply.status}"
    if reply.status == UNAUTHORIZED:
        raise RefusedError(f"{where}: {reply.excerpt()}; set {TOKEN} to the server's token in the environment")
    if not 200 <= reply.status < 300:
        raise RefusedError(f"{where}: {reply.excerpt()}; set the reward to a URL that takes the request")
    try:
        result = json.loads(reply.body(), object_pairs_hook=_unique_keys)
    except UnreadableError as error:
        raise RefusedError(f"{where} and {error}") from error
    except (ValueError, RecursionError) as error:
        kind = reply.headers.get("content-type", "none")
        raise RefusedError(f"{where} and no JSON (content type: {kind!r:.100}; {error}): {reply.excerpt()}") from error
    try:
        return read_columns(result, count)
    except ValueError as error:
        raise RefusedError(f"{where}, but {error}: {reply.excerpt()}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; ValueError where a key comes twice, as nobody can say which value is meant."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r:.100} comes twice")
        found[key] = value
    return found


def _asked_pause_s(reply: Reply) -> float:
    """Read Retry-After; 0 where it does not say a number of seconds."""
    seconds = reply.headers.get("Retry-After", "").strip()
    return float(seconds) if seconds.isascii() and seconds.isdecimal() else 0.0


def _shown(url: str) -> str:
    """The URL without what may be secret in it: a password, or a key in its query."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
