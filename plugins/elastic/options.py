"""Options of a changing number of rollout engines."""

from __future__ import annotations

from dataclasses import dataclass

from components.ranges import Count
from training.options.schema import Options


@dataclass(kw_only=True)
class ElasticOptions(Options, group="elastic", plugin="elastic"):
    """A number of rollout engines that changes during the run."""

    max_engines: Count | None = None
    """Maximum number of rollout engines. A node that joins the cluster gets engines up to this number. Default: no
    limit."""
