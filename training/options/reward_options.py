"""Options of rewards."""

from __future__ import annotations

from dataclasses import dataclass, fields

from components.ranges import Count, Seconds, Share
from components.rewards.base import RewardSettings
from training.options.schema import Options, of_plugin


@dataclass(kw_only=True)
class RewardOptions(Options, group="reward"):
    """Source of the rewards, and limits of reward code and servers."""

    source: str | None = None
    """Reward function. A Python file, `FILE.py` or `FILE.py:NAME`, with a function in the signature of TRL, OpenRLHF or
    verl; the URL of a reward server (several with commas); a scorer: `exact_match`, or one of a plug-in
    (<names of scorer>); or a weighted sum, such as `0.7*gsm8k + 0.3*style.py`, whose parts are also
    logged separately. Default: the scorer of the task in data.path."""
    workers: Count = 1
    """Number of processes that run the Python file or the scorer."""
    timeout_s: Seconds = 60.0
    """Timeout of reward code per response, in seconds. A response that exceeds it counts as failed."""
    max_failed_share: Share = 0.1
    """Maximum share of a batch's responses that may fail before the run stops. Up to two failures are tolerated at any
    share above 0, unless they are the whole batch. 0 tolerates none."""
    while_generating: bool = of_plugin("streamed_rewards", True)
    """vllm: score each response when it is complete, while others are generated, if the reward is a scorer, a function
    of one response in verl's signature, or a sum of these. Changes the speed, not the rewards. Each engine has
    reward.workers processes. false scores all responses after the generation."""
    url_timeout_s: Seconds = 180.0
    """Timeout of one request to a reward server, in seconds. A request is tried five times."""
    url_batch_size: Count = 64
    """Number of responses per request to a reward server."""

    def settings(self) -> RewardSettings:
        """Return the settings of reward code and reward servers."""
        options = vars(self)
        shared = [field.name for field in fields(RewardSettings) if field.name in options]
        return RewardSettings(**{name: options[name] for name in shared})
