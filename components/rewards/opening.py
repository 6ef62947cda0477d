"""Opening of a reward by its specification: a scorer, a Python file, reward servers, or a weighted sum of these."""

from __future__ import annotations

from components.registry import load
from components.rewards.base import SUM, RewardSettings, RewardSource, check_reward, reward_parts
from components.rewards.servers import client_of, is_server, reward_urls
from components.rewards.workers import WorkerReward


def open_reward(spec: str, settings: RewardSettings | None = None) -> RewardSource:
    """Open a reward.

    Args:
        spec: name of a scorer, function of a .py file (`FILE.py` or `FILE.py:NAME`), or comma-separated URLs; or a
            weighted sum of these: `0.7*gsm8k + 0.3*style.py + 1*http://a:5000/score`.
        settings: settings of processes and requests.

    Raises:
        ValueError: the reward cannot be opened.
    """
    check_reward(spec)
    settings = settings or RewardSettings()
    parts = reward_parts(spec)
    # A single reward without a weight is not a sum, so its logs have no prefix.
    if parts == [(1.0, spec)]:
        return open_part(spec, settings)
    return load(SUM, "weighted", f"reward.source={spec}")(parts, settings)


def open_part(spec: str, settings: RewardSettings, *, in_sum: bool = False) -> RewardSource:
    """Open a reward without weights, alone or as a part of a sum."""
    if is_server(spec):
        urls = reward_urls(spec)
        return client_of(urls)(urls, settings)
    return WorkerReward(spec, settings, in_sum=in_sum)
