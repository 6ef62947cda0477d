"""The token without which nobody joins, calls or reads a Ray that we start."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from core.errors import JobError
from core.shared_memory import claim_shared

_MODE, _PATH, _TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"


@contextlib.contextmanager
def own_token(folder: Path) -> Iterator[Path]:
    """Let every Ray that this process starts inside take only calls that carry a new random token.

    Ray's ports listen on all interfaces, and whoever may call them runs code as this user. The token is in a file of
    mode 600; its path, not the token, is in the environment that Ray's processes inherit.

    Args:
        folder: in shared memory, made here and removed at the end; it must not be that of anything else.

    Yields:
        The file of the token.
    """
    claim_shared(folder)
    file = folder / "ray_token"
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(secrets.token_hex(32))
    before = {name: os.environ.get(name) for name in (_MODE, _PATH, _TOKEN)}
    # RAY_AUTH_TOKEN would come before the file, and stand in the environment of every process.
    _apply({_MODE: "token", _PATH: str(file), _TOKEN: None})
    try:
        yield file
    finally:
        _apply(before)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def token_faults_named(address: str) -> Iterator[None]:
    """Check the token for a cluster's address, and name it in the error of a connection that is made inside.

    Raises:
        JobError: the cluster rejects the token of this process, or it has none.
    """
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
    from ray.exceptions import AuthenticationError

    try:
        if address.rpartition(":")[2].isdecimal() and "://" not in address:
            # ray.init would try for 20 s, and its error does not name the token.
            ensure_token_if_auth_enabled(create_token_if_missing=False)
            GcsClient(address=address)
        yield
    except Exception as error:
        causes = [error, error.__cause__, error.__context__]
        if not any(isinstance(cause, AuthenticationError) or "AuthenticationError" in str(cause) for cause in causes):
            raise
        path = os.environ.get(_PATH)
        used = f"the token in {path}" if path else f"{_TOKEN}" if os.environ.get(_TOKEN) else "no token"
        mode = os.environ.get(_MODE, "disabled")
        raise JobError(
            f"the Ray cluster at {address} rejects the authentication token of this process, which has {_MODE}={mode} "
            f"and {used}; set {_MODE}=token and {_PATH} to a file with the token of the cluster"
        ) from error


def _apply(environment: Mapping[str, str | None]) -> None:
    """Set the variables, and let Ray, which reads them when it is imported, read them again."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
