"""Reward servers: URLs in a reward specification, and the bearer token."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from components.registry import load, names

KIND = "reward source"
"""Kind of plug-in in the registry. It maps a URL scheme to a client: a function of a list of URLs and `RewardSettings`
that returns a `RewardSource`.
"""


def is_server(part: str) -> bool:
    """Return True if a part of a reward is one or more URLs."""
    return "://" in part


def reward_urls(spec: str) -> list[str]:
    """Split a comma-separated list of http(s) URLs.

    Raises:
        ValueError: an item is not such a URL.
    """
    urls = [part.strip() for part in spec.split(",")]
    for url in urls:
        try:
            parts = urlsplit(url)
            is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid or any(character.isspace() for character in url):
            raise ValueError(
                f"{url!r} in the reward {spec!r} is not a URL of a server; set it to one .py file, one scorer, or to "
                "http://HOST:PORT/PATH, several separated by commas"
            )
    return urls


def check_servers(part: str) -> None:
    """Check URLs without a request to a server.

    Raises:
        MissingPlugin: no plug-in has a client for these servers.
        ValueError: an item is not a URL of a server.
    """
    urls = reward_urls(part)
    # `client_of` raises the error. With a known scheme it is not called, because it imports the client's libraries.
    if urlsplit(urls[0]).scheme not in names(KIND):
        client_of(urls)


def client_of(urls: list[str]) -> Any:
    """Return the client of servers; see `KIND`.

    Raises:
        MissingPlugin: no plug-in has a client for these servers.
    """
    return load(KIND, urlsplit(urls[0]).scheme)
