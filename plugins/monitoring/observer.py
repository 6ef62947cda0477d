"""The monitoring endpoint as an observer of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plugins.monitoring.address import endpoint_fault
from training.tracking.observers import RunObserver

if TYPE_CHECKING:
    from plugins.monitoring.endpoint import MetricsEndpoint


class MonitoringObserver(RunObserver):
    """Updates the state that a monitoring endpoint serves."""

    def __init__(self, endpoint: MetricsEndpoint) -> None:
        """
        Args:
            endpoint: a server whose port is bound.
        """
        self.endpoint = endpoint

    @classmethod
    def check(cls, options: Any) -> None:
        """See `ObserverType.check`."""
        if fault := endpoint_fault(options.metrics_host):
            raise ValueError(fault)

    @classmethod
    def open(cls, recipe: str, config: Any, roles: Mapping[str, int]) -> MonitoringObserver | None:
        """Bind the port that `log.metrics_port` names; see `ObserverType.open`."""
        if config is None or config.log.metrics_port is None:
            return None
        # Imported here, so that runs without an endpoint do not load an HTTP server.
        from plugins.monitoring.endpoint import MetricsEndpoint, RunState

        return cls(MetricsEndpoint(RunState(recipe, roles), config.log.metrics_host, config.log.metrics_port))

    def start(self, run_dir: Path, emit: Callable[[Any], None]) -> Sequence[str]:  # noqa: ARG002 - serves the state alone
        """See `RunObserver.start`."""
        return (f"metrics at {self.endpoint.url}/metrics and {self.endpoint.url}/state",)

    def __call__(self, event: Any) -> None:
        """See `RunObserver.__call__`."""
        self.endpoint.state(event)

    def close(self) -> None:
        """Stop the server."""
        self.endpoint.close()
