"""Authentication token of the Ray clusters that this project starts."""

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
    """Start Ray clusters inside the block with a new random token, which every call must carry.

    Ray's ports listen on all interfaces, and every accepted caller can run code as this user. The token is in a file
    with mode 600. The environment that Ray's processes inherit contains its path, not the token.

    Args:
        folder: folder in shared memory, created here and removed at the end. Nothing else may use it.

    Yields:
        Path to the file with the token.
    """
    claim_shared(folder)
    file = folder / "ray_token"
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(secrets.token_hex(32))
    before = {name: os.environ.get(name) for name in (_MODE, _PATH, _TOKEN)}
    # RAY_AUTH_TOKEN is removed: it would take precedence over the file, and be in the environment of every process.
    _apply({_MODE: "token", _PATH: str(file), _TOKEN: None})
    try:
        yield file
    finally:
        _apply(before)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def token_faults_named(address: str) -> Iterator[None]:
    """Check the token of this process for a cluster, and name it in authentication errors inside the block.

    Raises:
        JobError: the cluster rejects the token of this process, or the process has none.
    """
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
    from ray.exceptions import AuthenticationError

    try:
        if address.rpartition(":")[2].isdecimal() and "://" not in address:
            # Checked here, because ray.init would retry for 20 s, and its error does not name the token.
            ensure_token_if_auth_enabled(create_token_if_missing=False)
            GcsClient(address=address)
        yield
    except Exception as error:
        causes = [error, error.__cause__, error.__context__]
        if not any(isinstance(cause, AuthenticationError) or "AuthenticationError" in str(cause) for cause in causes):
            raise
        token = "no token"
        if os.environ.get(_TOKEN):
            token = _TOKEN
        if path := os.environ.get(_PATH):
            token = f"the token in {path}"
        mode = os.environ.get(_MODE, "disabled")
        raise JobError(
            f"the Ray cluster at {address} rejects the authentication token of this process, which has {_MODE}={mode} "
            f"and {token}; set {_MODE}=token and {_PATH} to a file with the token of the cluster"
        ) from error


def _apply(environment: Mapping[str, str | None]) -> None:
    """Set environment variables (None: unset), and make Ray read them again. It reads them once, at its import."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
