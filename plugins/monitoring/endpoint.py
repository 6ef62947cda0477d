"""Monitoring endpoint of a run: serves step, metrics, phase and roles over HTTP, for Prometheus and as JSON."""

from __future__ import annotations

import hmac
import json
import logging
import math
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from typing import Any

from core import CallEvent, JobEvent, MemoryEvent
from plugins.monitoring.address import endpoint_token
from training.tracking.event_types import AlarmEvent, PhaseEvent, StepEvent
from training.tracking.serialization import finite, plain

_REQUEST_S = 10
_REQUESTS_AT_ONCE = 8
_WHOLE_LIFE = "run"
"""Method of the trainer that lasts as long as the job. It is not listed as a call."""

logger = logging.getLogger(__name__)


class RunState:
    """An observer that keeps the latest state of a run. Its methods may be called from any thread."""

    def __init__(self, recipe: str, roles: Mapping[str, int]) -> None:
        """
        Args:
            recipe: name of the recipe.
            roles: number of workers of each role.
        """
        self._recipe = recipe
        self._roles = dict(roles)
        self._lock = threading.Lock()
        self._status = "starting"
        self._step = 0
        self._steps = 0
        self._metrics: dict[str, Any] = {}
        self._phase: PhaseEvent | None = None
        # Prometheus needs counters that never decrease, so seconds are summed over the run.
        self._phase_seconds: defaultdict[str, float] = defaultdict(float)
        self._calls: dict[tuple[str, int, str, float], None] = {}
        self._lost: Counter[str] = Counter()
        self._memory: dict[str, int] = {}
        self._alarms: list[str] = []

    def __call__(self, event: Any) -> None:
        """Process an event of the job."""
        with self._lock:
            if isinstance(event, StepEvent):
                self._step = event.step
                self._steps = event.steps
                self._metrics = finite(plain(event.metrics))[0]
            elif isinstance(event, PhaseEvent):
                self._take_phase(event)
            elif isinstance(event, CallEvent):
                self._take_call(event)
            elif isinstance(event, MemoryEvent):
                self._memory = dict(event.bytes)
            elif isinstance(event, AlarmEvent):
                self._alarms.append(event.alarm)
            elif isinstance(event, JobEvent):
                self._take_job(event)

    def _take_phase(self, event: PhaseEvent) -> None:
        if event.seconds is None:
            self._phase = event
        else:
            self._phase = None
            self._phase_seconds[event.phase] += event.seconds

    def _take_call(self, event: CallEvent) -> None:
        key = (event.role, event.rank, event.method, event.began)
        if event.seconds is None:
            self._calls[key] = None
        else:
            self._calls.pop(key, None)

    def _take_job(self, event: JobEvent) -> None:
        if event.kind == "start":
            self._status = "running"
        elif event.kind == "end":
            self._status = event.text.partition(":")[0]
        lost: set[str] = set()
        if event.kind == "lost":
            # Workers lost together are joined by "+", as in "ACTOR-0+ACTOR-1". A role counts once.
            lost = {part.rpartition("-")[0] for part in event.process.split("+")}
        self._lost.update(lost)
        if event.kind == "restart" or lost:
            # Calls of lost processes never end, so they would be listed for ever.
            self._calls = {key: None for key in self._calls if lost and key[0] not in lost}

    def current(self) -> dict[str, Any]:
        """Return the state as an object for JSON."""
        # The wall clock, because the events of other processes have its times.
        now = time.time()
        with self._lock:
            calls = [
                {"role": role, "rank": rank, "method": method, "seconds": now - began}
                for role, rank, method, began in self._calls
                if method != _WHOLE_LIFE
            ]
            roles = {
                role: {
                    "workers": size,
                    "calls": [call for call in calls if call["role"] == role],
                    "lost": self._lost[role],
                }
                for role, size in self._roles.items()
            }
            phase = None
            if self._phase is not None:
                phase = {"name": self._phase.phase, "seconds": now - self._phase.began}
            return {
                "recipe": self._recipe,
                "status": self._status,
                "step": self._step,
                "steps": self._steps,
                "metrics": dict(self._metrics),
                "phase": phase,
                "phase_seconds": dict(self._phase_seconds),
                "roles": roles,
                "memory_bytes": dict(self._memory),
                "alarms": list(self._alarms),
            }

    def prometheus(self) -> str:
        """Return the state in the text format of Prometheus."""
        return "\n".join(_prometheus_lines(self.current())) + "\n"


def _prometheus_lines(state: Mapping[str, Any]) -> Iterator[str]:
    yield from _family("troupe_step", "gauge", "Latest step whose metrics were logged.", {"": state["step"]})
    yield from _family("troupe_steps", "gauge", "Number of steps of the run; 0 if unknown.", {"": state["steps"]})
    named = {"status": state["status"], "recipe": state["recipe"]}
    yield from _family("troupe_run", "gauge", "Status of the run.", {_labels(**named): 1})
    metrics = {_labels(name=name): value for name, value in state["metrics"].items() if _is_number(value)}
    yield from _family("troupe_metric", "gauge", "Metrics of the latest step, by name.", metrics)
    seconds = {_labels(phase=phase): value for phase, value in state["phase_seconds"].items()}
    yield from _family("troupe_phase_seconds_total", "counter", "Seconds spent in each phase.", seconds)
    phase = state["phase"]
    current = {}
    if phase:
        current[_labels(phase=phase["name"])] = phase["seconds"]
    yield from _family("troupe_phase_running_seconds", "gauge", "Seconds since the current phase began.", current)
    roles = state["roles"].items()
    yield from _family(
        "troupe_role_workers", "gauge", "Workers of each role.", {_labels(role=r): v["workers"] for r, v in roles}
    )
    yield from _family(
        "troupe_role_calls", "gauge", "Calls that run now.", {_labels(role=r): len(v["calls"]) for r, v in roles}
    )
    yield from _family(
        "troupe_role_lost_total", "counter", "Workers lost so far.", {_labels(role=r): v["lost"] for r, v in roles}
    )
    memory = {_labels(role=role): value for role, value in state["memory_bytes"].items()}
    yield from _family("troupe_memory_bytes", "gauge", "Memory of each role's processes.", memory)
    yield from _family("troupe_alarms_total", "counter", "Alarms of the run.", {"": len(state["alarms"])})


def _family(name: str, kind: str, text: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values.items():
        yield f"{name}{labels} {float(value)!r}"


def _labels(**values: str) -> str:
    escaped = {
        # Escaped as the text format of Prometheus requires.
        name: str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        for name, value in values.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class MetricsEndpoint:
    """A server of `GET /metrics` (Prometheus) and `GET /state` (JSON), on a thread of the driver.

    With a token in TROUPE_METRICS_TOKEN, requests must send it as `Authorization: Bearer ...`.
    """

    def __init__(self, state: RunState, host: str, port: int) -> None:
        """Bind the port.

        Args:
            state: the state to serve.
            host: address to listen at.
            port: port; 0 selects a free one.

        Raises:
            OSError: the address cannot be used.
        """
        self.state = state
        self._token = endpoint_token()
        family = AF_INET
        shown_host = host
        if ":" in host:
            # An IPv6 address, which stands in brackets in a URL.
            family = AF_INET6
            shown_host = f"[{host}]"
        handler = type("Handler", (_Handler,), {"endpoint": self})
        server = type("Server", (_Server,), {"address_family": family})
        try:
            self._server = server((host, port), handler)
        except OSError as error:
            raise OSError(
                f"log.metrics_host={host} log.metrics_port={port} cannot be used ({error.strerror}); set another"
            ) from error
        self.url = f"http://{shown_host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="troupe-metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def respond(self, path: str, authorization: str) -> tuple[int, str, str]:
        """Return HTTP status, content type and body of the response to a request."""
        # compare_digest takes the same time for every wrong token, so that response times reveal nothing about it.
        if self._token and not hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode()):
            return 401, "text/plain", "a valid token is required\n"
        if path == "/metrics":
            return 200, "text/plain; version=0.0.4; charset=utf-8", self.state.prometheus()
        if path in ("/", "/state"):
            return 200, "application/json", json.dumps(self.state.current())
        return 404, "text/plain", "there are /metrics and /state\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._slots = threading.BoundedSemaphore(_REQUESTS_AT_ONCE)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        # Each request has a thread. Without a limit, slow clients would take more and more threads from the run.
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - socketserver's signature
        logger.debug("a request of %s failed: %s", client_address, sys.exc_info()[1])


class _Handler(BaseHTTPRequestHandler):
    endpoint: MetricsEndpoint
    timeout = _REQUEST_S
    server_version = "troupe"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        status, kind, text = self.endpoint.respond(path, self.headers.get("Authorization", ""))
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        # Requests come every few seconds and would fill the terminal, which is for the run.
        logger.debug(format, *args)
