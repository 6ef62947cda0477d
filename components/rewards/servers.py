"""Reward servers: their URLs in a reward, and their token."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from components.registry import load, names

TOKEN = "TROUPE_REWARD_TOKEN"
"""Environment variable of the bearer token, for servers and for those that ask them."""
KIND = "reward source"
"""Kind of the plug-ins that ask servers, by the scheme of the URLs: a callable of a list of URLs and `RewardSettings`
that returns a `RewardSource`.
"""


def is_server(part: str) -> bool:
    """Return True if a part of a reward is one or more URLs."""
    return "://" in part


def reward_urls(spec: str) -> list[str]:
    """Split a list of http(s) URLs with commas between them.

    Raises:
        ValueError: it holds anything else.
    """
    urls = [part.strip() for part in spec.split(",")]
    for url in urls:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            good = False
        if not good or any(character.isspace() for character in url):
            raise ValueError(
                f"{url!r} in the reward {spec!r} is no URL of a server; set it to one .py file, one scorer, or to "
                "http://HOST:PORT/PATH, several with commas between them"
            )
    return urls


def check_servers(part: str) -> None:
    """Check URLs without asking a server.

    Raises:
        MissingPlugin: no plug-in asks such servers.
        ValueError: one is no URL of a server.
    """
    urls = reward_urls(part)
    if urlsplit(urls[0]).scheme not in names(KIND):  # otherwise the client's libraries are not loaded for a check
        client_of(urls)


def client_of(urls: list[str]) -> Any:
    """Return what asks servers; see `KIND`.

    Raises:
        MissingPlugin: no plug-in asks such servers.
    """
    return load(KIND, urlsplit(urls[0]).scheme)


def reward_token(given: str | None = None) -> str | None:
    """Return the bearer token of reward servers: `given`, or the environment's; None if there is none.

    Raises:
        ValueError: it is empty, or no header can hold it.
    """
    if given is not None and not given.strip():
        raise ValueError("token is empty, so that everybody would be let in; set one, or leave it out")
    token = (given or os.environ.get(TOKEN, "")).strip()
    if not (token.isascii() and token.isprintable()):  # what the HTTP library would say of it shows it
        raise ValueError(f"{TOKEN} holds characters that no HTTP header can; set it to the server's token")
    return token or None
