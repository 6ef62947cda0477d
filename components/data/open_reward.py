"""Opens a reward by what it is called: a scorer, a Python file, reward servers, or a weighted sum of these."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from components.data.rewards import RewardSettings, check_reward, reward_parts, reward_urls

if TYPE_CHECKING:
    from components.data.remote_reward import RemoteReward
    from components.data.reward_sum import RewardSum
    from components.data.reward_workers import WorkerReward


def open_reward(spec: str, settings: RewardSettings | None = None) -> WorkerReward | RemoteReward | RewardSum:
    """Open a reward: the name of a scorer, a .py file that defines `reward_func`, or URLs with commas between them.

    Or a weighted sum of such, each with its weight: `0.7*gsm8k + 0.3*style.py + 1*http://a:5000/score`.
    """
    check_reward(spec)
    settings = settings or RewardSettings()
    parts = reward_parts(spec)
    if parts == [(1.0, spec)]:
        return _open_one(spec, settings)
    from components.data.reward_sum import RewardSum

    with ExitStack() as opened:
        sources = [opened.enter_context(_open_one(part, settings)) for _, part in parts]
        return RewardSum(parts, sources, settings, opened.pop_all().close)


def _open_one(spec: str, settings: RewardSettings) -> WorkerReward | RemoteReward:
    if "://" in spec:
        from components.data.remote_reward import RemoteReward

        return RemoteReward(reward_urls(spec), settings)
    from components.data.reward_workers import WorkerReward

    return WorkerReward(spec, settings)
