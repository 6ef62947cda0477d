"""Options of rewards."""

from __future__ import annotations

from dataclasses import dataclass, fields

from components.ranges import Count, Seconds, Share
from components.rewards.base import RewardSettings
from training.options.schema import Options


@dataclass(kw_only=True)
class RewardOptions(Options, group="reward"):
    """Source of the rewards, and the limits of reward code and servers."""

    source: str | None = None
    """A Python file with a reward function, `FILE.py` or `FILE.py:NAME`, in the signature of TRL, OpenRLHF or verl; the
    URL of a reward server (several with commas between); a scorer: `gsm8k`, `gsm8k_flexible`, `math`, `exact_match`, or
    one of a plug-in (<names of scorer>); or a weighted sum, as `0.7*gsm8k + 0.3*style.py`, each part with its weight,
    and logged by itself. Default: that of the task which data.path names."""
    workers: Count = 1
    """Processes that run the Python file or the scorer."""
    timeout_s: Seconds = 60.0
    """Seconds that reward code may take over one response, before it is counted as failed."""
    max_failed_share: Share = 0.1
    """Share of a batch's responses that may fail (or two, if that is more and not all); above it the run stops."""
    url_timeout_s: Seconds = 180.0
    """Seconds that a reward server may take over one request; a request is tried five times."""
    url_batch_size: Count = 64
    """Responses per request to a reward server."""

    def settings(self) -> RewardSettings:
        """How reward code and reward servers are used."""
        own = vars(self)
        return RewardSettings(**{part.name: own[part.name] for part in fields(RewardSettings) if part.name in own})
