"""Loopback addresses are recognised, and clients reach them without a proxy."""

import os

import httpx
import pytest

from components.net.direct import direct_loopback, is_loopback
from components.net.loopback import loopback_variables


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "LocalHost.", "a.localhost", "::1", "[::1]", "127.9.9.9", "127.1", "0.0.0.0", "::"]
    + ["::ffff:127.0.0.1"],
)
def test_every_form_of_a_loopback_address_is_recognised(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "example.org", "localhost.example.org", "::2", "fe80::1%eth0", ""])
def test_other_hosts_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_proxy_variables_keep_the_users_entries_and_are_unchanged_without_a_proxy() -> None:
    actual = loopback_variables({"https_proxy": "http://p:1", "NO_PROXY": "intra, b", "no_proxy": "c"})
    assert actual == dict.fromkeys(("no_proxy", "NO_PROXY"), "c,intra,b,127.0.0.1,localhost,::1")
    assert loopback_variables({"NO_PROXY": "intra", "http_proxy": ""}) == {}


def test_clients_inside_the_block_bypass_the_proxy_for_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    before = dict(os.environ)
    with direct_loopback(), httpx.Client() as client:
        direct = {pattern.pattern for pattern, transport in client._mounts.items() if transport is None}
    assert {"all://127.0.0.1", "all://localhost", "all://[::1]"} <= direct
    assert dict(os.environ) == before
