"""How a policy talks to an environment: one turn, many turns, tools."""

from agents.environment import AgentInstanceBase
from agents.episode import AgentExecutorBase
from agents.executor import MultiTurnAgentExecutor, SingleTurnAgentExecutor

__all__ = ["AgentExecutorBase", "AgentInstanceBase", "MultiTurnAgentExecutor", "SingleTurnAgentExecutor"]
