"""Agents that are clients of the endpoint."""

from __future__ import annotations

from typing import Any

import openai

from agents.openai_executor import OpenAIAgentExecutor
from components.batch import Batch
from tests.agents.episode_cases import Rig


class Blocking(OpenAIAgentExecutor):
    """An agent whose `run_episodes` uses a blocking client without retries."""

    def run_agent(self, prompt: str, label: Any, **options: Any) -> Any:
        with openai.OpenAI(base_url=options["base_url"], api_key=options["api_key"], max_retries=0) as client:
            return self.run_episodes(client, prompt, label)

    def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
        raise NotImplementedError


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chat(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(model="any", messages=messages, **more).choices[0]


def check_drawn(rig: Rig, batch: Batch) -> None:
    """Check that every token of the policy has the log-probability of the trainer's forward pass."""
    difference_N = (rig.training_logprobs(batch) - batch["rollout_logprob"]).abs()[batch["action_mask"]]
    assert len(difference_N) and float(difference_N.max()) < 1e-4
    assert batch["token_version"][batch["action_mask"]].eq(0).all()
