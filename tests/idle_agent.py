"""An agent for tests, whatever the policy speaks: one answer, which earns nothing."""

from agents import SingleTurnAgentExecutor


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, list[float]]:
    """Nothing for anybody."""
    return {"rewards": [0.0] * len(queries)}


AgentExecutor = SingleTurnAgentExecutor(reward_func)
