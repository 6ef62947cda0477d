"""An unreachable cluster in RAY_ADDRESS is rejected within seconds, before anything starts."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.backends import ray_address
from core.backends.ray_address import check_reachable
from core.errors import JobError
from tests.messages import says


@contextmanager
def server(reply: bytes | None) -> Iterator[str]:
    """Yield the address of a server that sends `reply` and closes. With None it accepts no connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(reply or b"")

        if reply is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_auto_without_a_cluster_ends_a_run_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipes.grpo.main import main

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert main([f"run_dir={tmp_path}/run", "backend=ray"]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(says("RAY_ADDRESS=auto", "ray start --head", tmp_path), last)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_port_that_does_not_respond_ends_a_run_before_it_starts(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipes.grpo.main import main

    monkeypatch.setattr(ray_address, "REACHED_WITHIN_S", 0.5)
    with server(None) as address:
        monkeypatch.setenv("RAY_ADDRESS", f"{scheme}{address}")
        assert main([f"run_dir={tmp_path}/run", "backend=ray"]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(says(f"{scheme}{address}", "timed out", "RAY_ADDRESS"), last)
    assert not (tmp_path / "run").exists()


def test_a_port_that_does_not_respond_raises_an_error_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_address.REACHED_WITHIN_S <= 10
    monkeypatch.setattr(ray_address, "REACHED_WITHIN_S", 0.5)
    began = time.monotonic()
    with server(None) as address, pytest.raises(JobError, match=says(address, "timed out")):
        check_reachable(address)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9\r\n"])
def test_a_server_of_another_protocol_is_rejected(reply: bytes) -> None:
    with server(reply) as address, pytest.raises(JobError, match=says(address, "not a Ray cluster")):
        check_reachable(address)


@pytest.mark.parametrize("form", ["{}", "[{}]", "ray://{}"])
def test_a_server_with_an_http2_preface_is_accepted(form: str) -> None:
    with server(b"\0\0\x06\x04\0\0\0\0\0\0\x03\0\0\0d") as address:
        host, _, port = address.rpartition(":")
        check_reachable(f"{form.format(host)}:{port}")


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_a_closed_port_is_rejected(prefix: str) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # reserves the port, so that no other program listens there
        address = f"{prefix}127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(JobError, match=says(address, "refused", "unset RAY_ADDRESS")):
            check_reachable(address)


def test_a_real_cluster_is_accepted(ray_address: str) -> None:
    check_reachable(ray_address)
