"""Opens a reward by what it is called: a scorer, a Python file, or reward servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.data.reward_workers import WorkerReward
from components.data.rewards import RewardSettings, check_reward, reward_urls

if TYPE_CHECKING:
    from components.data.remote_reward import RemoteReward


def open_reward(spec: str, settings: RewardSettings | None = None) -> WorkerReward | RemoteReward:
    """Open a reward: the name of a scorer, a function of a .py file (`FILE.py` or `FILE.py:NAME`), or
    URLs with commas between them.
    """
    check_reward(spec)
    settings = settings or RewardSettings()
    if "://" in spec:
        from components.data.remote_reward import RemoteReward

        return RemoteReward(reward_urls(spec), settings)
    return WorkerReward(spec, settings)
