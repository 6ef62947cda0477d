"""Reward servers: URLs in a reward specification, and the bearer token."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from components.registry import load, names

TOKEN = "TROUPE_REWARD_TOKEN"
"""Environment variable of the bearer token, for servers and their clients."""
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


def reward_token(option: str | None = None) -> str | None:
    """Return the bearer token of reward servers from an option or the environment, or None without one.

    Raises:
        ValueError: the option is empty, or the token has characters that an HTTP header cannot hold.
    """
    if option is not None and not option.strip():
        raise ValueError("token is empty, so the server would accept every client; set a token, or do not set it")
    token = (option or os.environ.get(TOKEN, "")).strip()
    if not (token.isascii() and token.isprintable()):  # the error of the HTTP library would print the token
        raise ValueError(f"{TOKEN} holds characters that an HTTP header cannot hold; set it to the server's token")
    return token or None
