"""Options of W&B, TensorBoard and the monitoring endpoint of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from components.ranges import Range
from components.registry import load
from training.options.schema import Options, errors_of, of_plugin
from training.tracking.observers import OBSERVER, ObserverType
from training.tracking.sinks import SINK


@dataclass(kw_only=True)
class LogOptions(Options, group="log"):
    """Destinations of metrics besides the files of the run folder, which are always written."""

    wandb: bool = of_plugin("wandb", False)
    """Log to W&B, with the key in WANDB_API_KEY. Without a key, W&B runs offline and writes to the run folder."""
    wandb_project: str = of_plugin("wandb", "troupe")
    """Name of the W&B project."""
    wandb_name: str | None = of_plugin("wandb", None)
    """Name of the run in W&B. Default: the name of the run folder."""
    wandb_group: str | None = of_plugin("wandb", None)
    """Group of the run in W&B, which shows the runs of a group together. No group by default."""
    wandb_org: str | None = of_plugin("wandb", None)
    """W&B user or team that owns the project. Default: the owner of the key."""
    wandb_key: str | None = of_plugin("wandb", None)
    """W&B API key. Setting it enables W&B. Default: WANDB_API_KEY, or the key saved by `wandb login`."""
    tensorboard: bool = of_plugin("tensorboard", False)
    """Write TensorBoard event files to run_dir/tensorboard."""
    tensorboard_dir: str | None = of_plugin("tensorboard", None)
    """Parent folder of the TensorBoard event files, in place of run_dir. Setting it enables TensorBoard."""
    metrics_port: Annotated[int, Range(least=0, most=65535)] | None = of_plugin("monitoring", None)
    """Port of an HTTP server with the step, metrics, phase and roles of the run: /metrics (Prometheus) and /state
    (JSON). 0 selects a free port. No server by default."""
    metrics_host: str = of_plugin("monitoring", "127.0.0.1")
    """IP address of that server. Any address other than loopback needs a token in TROUPE_METRICS_TOKEN."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        for name in self.sinks():
            yield from errors_of("", load, SINK, name, f"log.{name}=true")
        if self.metrics_port is not None:
            yield from errors_of("", self._check_endpoint)

    def sinks(self) -> dict[str, dict[str, Any]]:
        """Return the settings of the metric sinks that the options select, by name of the sink; see `Tracker`."""
        chosen: dict[str, dict[str, Any]] = {}
        if self.tensorboard or self.tensorboard_dir:
            chosen["tensorboard"] = {"folder": self.tensorboard_dir}
        # A key alone enables W&B, because nobody sets one without the intention to log there.
        if self.wandb or self.wandb_key:
            chosen["wandb"] = {
                "key": self.wandb_key,
                "project": self.wandb_project,
                "run_name": self.wandb_name,
                "group": self.wandb_group,
                "org": self.wandb_org,
            }
        return chosen

    def _check_endpoint(self) -> None:
        endpoint: ObserverType = load(OBSERVER, "monitoring", f"log.metrics_port={self.metrics_port}")
        endpoint.check(self)
