"""Rewards from HTTP servers.

    POST {"query": [...], "prompts": [...], "labels": [...]}
    ->   {"rewards": [...], "scores": [...], "extra_logs": {"name": [...]}}

"scores" and "extra_logs" are optional. An entry of "extra_logs" may be a single number. Duplicate keys are rejected. A
body may be compressed once with gzip.

A request has a deadline (`url_timeout_s`), even if the server keeps sending, and a reply has a size limit. Proxies of
the environment are used, but not for loopback addresses. Each server has a thread that takes requests from a common
queue, so that a slow server gets fewer requests. Errors that may be temporary are retried, on the next server if there
are several. A missing reward is never replaced by a default value. Servers that require a bearer token get the one in
the environment variable TROUPE_REWARD_TOKEN.
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
    Responses,
    RewardOutput,
    RewardSettings,
    RewardSource,
    join_columns,
    read_columns,
)
from components.rewards.errors import RefusedError, RewardError
from components.rewards.server_token import TOKEN, reward_token
from components.rewards.threads import in_threads

UNAUTHORIZED = 401
TOO_MANY_REQUESTS = 429
LONGEST_PAUSE_S = 10.0
"""Maximum number of seconds between two tries, even if a server requests more with Retry-After."""

_log = logging.getLogger(__name__)


class RemoteReward(RewardSource):
    """One or several servers that compute the same reward."""

    def __init__(self, urls: Sequence[str], settings: RewardSettings, *, pause_s: float = 0.5) -> None:
        """Prepare a client. No request is sent yet.

        Args:
            urls: URLs of the servers.
            settings: timeouts, number of tries, and size of a request.
            pause_s: seconds before the second try. It doubles before each further one.

        Raises:
            ValueError: the token cannot be sent in an HTTP header.
        """
        self.source = f"reward server {', '.join(map(_shown, urls))}"
        self._urls = list(urls)
        self._settings = settings
        self._pause_s = pause_s
        # A separate generator: the global one has a state that the user's seed determines.
        self._random = random.Random()
        self._client = HttpClient(_authorization())

    def reward(self, samples: Responses) -> RewardOutput:
        """Compute the rewards of B samples. Servers get them as part of the queries.

        Raises:
            RefusedError: a server gave a reply that a new try would not change.
            RewardError: all tries failed.
        """
        queries, prompts, labels, _, _ = samples
        count = len(queries)
        size = self._settings.url_batch_size
        # One queue for all servers, so that a fast one takes more requests than a slow one.
        todo: queue.SimpleQueue[tuple[range, bytes]] = queue.SimpleQueue()
        for start in range(0, count, size):
            end = min(start + size, count)
            todo.put((range(start, end), self._body(queries[start:end], prompts[start:end], labels[start:end])))
        stop = threading.Event()
        works = [partial(self._work, first, todo, stop) for first in range(min(len(self._urls), todo.qsize()))]
        columns: list[tuple[range, Columns]] = []
        try:
            for thread_columns in in_threads(works):
                columns += thread_columns
        finally:
            # Threads finish their current request on their own. Waiting for them would delay the error.
            stop.set()
        return join_columns(count, columns, {})

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
        """Send requests until the queue is empty. The server that replied last gets the next request."""
        parts: list[tuple[range, Columns]] = []
        while not stop.is_set():
            try:
                places, body = todo.get_nowait()
            except queue.Empty:
                break
            server, columns = self._request(server, body, len(places), stop)
            # Waiting for slow servers must not look like a hung worker.
            beat()
            parts.append((places, columns))
        return parts

    def _request(self, server: int, body: bytes, count: int, stop: threading.Event) -> tuple[int, Columns]:
        """Send one request, to this server or, if it fails, to the next ones. Return the server that replied."""
        began = time.monotonic()
        tries = self._settings.url_tries
        reason = ""
        for attempt in range(1, tries + 1):
            url = self._urls[server % len(self._urls)]
            # The random factor keeps ranks from retrying at the same moment.
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
                # Other statuses below 500 are final: the same request would get the same reply.
                if reply.status != TOO_MANY_REQUESTS and reply.status < 500:
                    return server, _columns(url, reply, count)
                reason = f"HTTP status {reply.status}: {reply.excerpt()}"
                pause_s = max(pause_s, _requested_pause_s(reply))
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
    if not token:
        return {}
    return {"Authorization": f"Bearer {token}"}


def _columns(url: str, reply: Reply, count: int) -> Columns:
    """Read a reply with a final status, which a new try would not change.

    Raises:
        RefusedError: the status is an error, or the body does not have the expected format.
    """
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
    """Return a JSON object as a dict. Raise ValueError for a duplicate key, because its value would be ambiguous."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r:.100} comes twice")
        result[key] = value
    return result


def _requested_pause_s(reply: Reply) -> float:
    """Return the seconds in Retry-After, or 0.0 without a valid number of seconds."""
    seconds = reply.headers.get("Retry-After", "").strip()
    # isdecimal alone would accept digits of other scripts.
    if seconds.isascii() and seconds.isdecimal():
        return float(seconds)
    return 0.0


def _shown(url: str) -> str:
    """Return the URL without parts that may be secret: a password, or a key in its query."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
