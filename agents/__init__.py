"""Agents: episodes of a policy in an environment, with one turn, several turns, or tools.

The package is loaded like a plug-in: `training` loads it through components/registry.py if `agent.func_path` is set or
responses stay in flight across steps. Public names are imported on first use, so that reading PROVIDES imports nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agents.environment import AgentInstanceBase
    from agents.episode import AgentExecutorBase
    from agents.executor import MultiTurnAgentExecutor, SingleTurnAgentExecutor

__all__ = ["AgentExecutorBase", "AgentInstanceBase", "MultiTurnAgentExecutor", "SingleTurnAgentExecutor"]

PROVIDES = {
    "agents": {"check": "loading:check_agent", "trial": "first_call:try_agent", "sampler": "runner:open_runner"},
}
_MODULES = {
    "AgentInstanceBase": "environment",
    "AgentExecutorBase": "episode",
    "MultiTurnAgentExecutor": "executor",
    "SingleTurnAgentExecutor": "executor",
}
"""Module of each public name."""


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
