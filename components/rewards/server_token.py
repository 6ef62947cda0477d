"""Bearer token of reward servers and their clients."""

from __future__ import annotations

import os

TOKEN = "TROUPE_REWARD_TOKEN"
"""Environment variable of the bearer token, for servers and their clients."""


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
