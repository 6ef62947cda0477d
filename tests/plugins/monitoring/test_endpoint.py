"""The monitoring endpoint: responses, access control, and options that are refused before a run starts."""

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core import CallEvent, JobEvent, MemoryEvent
from plugins.monitoring.endpoint import MetricsEndpoint, RunState
from recipes.grpo.main import COMMAND
from tests.messages import says
from training.options.log_options import LogOptions
from training.tracking.event_types import AlarmEvent, PhaseEvent, StepEvent

ROOT = Path(__file__).parents[3]


def get(url: str, token: str = "") -> tuple[int, str]:
    """Return status and body of a response."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def running_state() -> RunState:
    """Return the state of a run in its third step, in which ROLLOUT has lost a process."""
    state = RunState("grpo", {"TRAINER": 1, "ACTOR": 2, "ROLLOUT": 1})
    now = time.time()
    for event in (
        JobEvent("start", now, text="attempt 1"),
        CallEvent("grpo", "TRAINER", 0, "run", now, 0),
        PhaseEvent("generate", now - 9, 4.0),
        PhaseEvent("generate", now - 5, 2.5),
        PhaseEvent("train", now - 2),
        CallEvent("grpo", "ACTOR", 1, "update", now - 2, 100),
        CallEvent("grpo", "ROLLOUT", 0, "generate", now - 3, 100),
        JobEvent("lost", now, process="ROLLOUT-0", text="ROLLOUT-0 died"),
        MemoryEvent(now, {"ACTOR": 123, "DRIVER": 7}),
        AlarmEvent("entropy", 3, now, "text", "advice"),
        StepEvent(3, 20, now, {"reward/score": 0.5, "actor/loss": float("nan"), "note": 'a "quoted" text'}),
    ):
        state(event)
    return state


def test_the_state_has_step_metrics_phase_and_roles() -> None:
    state = running_state().current()
    assert (state["recipe"], state["status"], state["step"], state["steps"]) == ("grpo", "running", 3, 20)
    assert state["metrics"]["reward/score"] == 0.5
    assert state["phase"]["name"] == "train"
    assert 2 <= state["phase"]["seconds"] < 60
    assert state["phase_seconds"] == {"generate": 6.5}
    actor = state["roles"]["ACTOR"]
    rollout = state["roles"]["ROLLOUT"]
    assert (actor["workers"], [(call["rank"], call["method"]) for call in actor["calls"]]) == (2, [(1, "update")])
    # The call of the lost process ended with it.
    assert (rollout["lost"], rollout["calls"]) == (1, [])
    assert state["roles"]["TRAINER"]["calls"] == []
    assert state["memory_bytes"] == {"ACTOR": 123, "DRIVER": 7}
    assert state["alarms"] == ["entropy"]
    json.loads(json.dumps(state, allow_nan=False))


def test_calls_and_phases_end_and_the_end_of_the_run_sets_the_status() -> None:
    state = RunState("grpo", {"ACTOR": 1})
    state(CallEvent("grpo", "ACTOR", 0, "update", 5.0, 0))
    state(CallEvent("grpo", "ACTOR", 0, "update", 5.0, 0, seconds=1.0))
    state(PhaseEvent("train", 5.0))
    state(PhaseEvent("train", 5.0, 1.0))
    state(JobEvent("end", 9.0, text="failed: ValueError: x"))
    current = state.current()
    assert (current["roles"]["ACTOR"]["calls"], current["phase"], current["status"]) == ([], None, "failed")


def test_the_official_client_parses_the_prometheus_text() -> None:
    families = {family.name: family for family in text_string_to_metric_families(running_state().prometheus())}
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert samples["troupe_step",] == 3
    assert samples["troupe_metric", ("name", "reward/score")] == 0.5
    assert ("troupe_metric", ("name", "note")) not in samples
    assert samples["troupe_phase_seconds_total", ("phase", "generate")] == 6.5
    assert samples["troupe_role_calls", ("role", "ACTOR")] == 1
    assert samples["troupe_role_lost_total", ("role", "ROLLOUT")] == 1
    assert samples["troupe_memory_bytes", ("role", "ACTOR")] == 123


@pytest.fixture
def endpoint() -> Iterator[MetricsEndpoint]:
    """Yield an endpoint at a free port of the loopback interface."""
    served = MetricsEndpoint(running_state(), "127.0.0.1", 0)
    yield served
    served.close()


def test_both_forms_are_served_and_nothing_else(endpoint: MetricsEndpoint) -> None:
    status, text = get(f"{endpoint.url}/metrics")
    assert (status, "troupe_step 3.0" in text) == (200, True)
    assert json.loads(get(f"{endpoint.url}/state")[1])["step"] == 3
    assert get(f"{endpoint.url}/../etc/passwd")[0] == 404


def test_idle_connections_take_at_most_eight_threads(endpoint: MetricsEndpoint) -> None:
    before = threading.active_count()
    port = int(endpoint.url.rpartition(":")[2])
    idle = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(20)]
    for connection in idle[8:]:  # closed immediately
        assert connection.recv(1) == b""
    assert threading.active_count() <= before + 8
    for connection in idle:
        connection.close()


def test_a_token_is_required_where_one_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_METRICS_TOKEN", "secret")
    served = MetricsEndpoint(running_state(), "127.0.0.1", 0)
    assert [get(f"{served.url}/metrics", token)[0] for token in ("", "other", "secret")] == [401, 401, 200]
    served.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3"])
def test_an_address_other_than_loopback_requires_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TROUPE_METRICS_TOKEN", raising=False)
    with pytest.raises(ValueError, match=says("log.metrics_host", host, "TROUPE_METRICS_TOKEN")):
        LogOptions(metrics_port=0, metrics_host=host)
    monkeypatch.setenv("TROUPE_METRICS_TOKEN", "secret")
    LogOptions(metrics_port=0, metrics_host=host)


def test_wrong_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match=says("log.metrics_host", "my machine", "127.0.0.1")):
        LogOptions(metrics_port=0, metrics_host="my machine")
    for host in ("127.0.0.1", "::1", "localhost"):
        LogOptions(metrics_port=0, metrics_host=host)


def test_a_port_in_use_is_refused_before_anything_starts(
    endpoint: MetricsEndpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(COMMAND, "ready", lambda config: config)
    port = endpoint.url.rpartition(":")[2]
    assert COMMAND.main([f"log.metrics_port={port}", f"run_dir={tmp_path / 'run'}", "backend=local"]) == 2
    assert f"log.metrics_port={port}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_the_option_no_server_is_imported() -> None:
    code = "import sys, recipes.grpo.main; print([m for m in sys.modules if m.endswith('tracking.endpoint')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert LogOptions().metrics_port is None


@pytest.mark.full
def test_a_run_serves_its_state_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    before = RunState.__call__

    def ask(self: RunState, event: Any) -> None:
        before(self, event)
        if isinstance(event, StepEvent):
            seen.append(self.current())

    monkeypatch.setattr(RunState, "__call__", ask)
    arguments = ["max_steps=2", "log.metrics_port=0", f"run_dir={tmp_path / 'run'}", "backend=local"]
    assert COMMAND.main(arguments) == 0
    assert [state["step"] for state in seen][-2:] == [1, 2]
    assert seen[-1]["phase_seconds"]
    assert {"ACTOR", "TRAINER"} <= set(seen[-1]["roles"])
    assert "reward/score" in seen[-1]["metrics"]
