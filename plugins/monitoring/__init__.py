"""Monitoring endpoint: serves the state of a run over HTTP. Loaded by `log.metrics_port`."""

PROVIDES = {"run observer": {"monitoring": "observer:MonitoringObserver"}}
