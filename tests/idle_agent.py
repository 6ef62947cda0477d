"""An agent for tests that ends after one response with reward 0, for any tokenizer."""

from agents import SingleTurnAgentExecutor


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, list[float]]:
    """Environment that gives reward 0 and ends."""
    return {"rewards": [0.0] * len(queries)}


AgentExecutor = SingleTurnAgentExecutor(reward_func)
