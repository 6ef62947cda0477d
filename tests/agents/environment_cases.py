"""Episodes of an environment with scripted policies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agents.environment import AgentInstanceBase
from agents.loading import check_agent
from agents.options import AgentOptions
from agents.runner import open_runner
from components.batch import Batch
from components.data.text import TextEncoder, load_tokenizer
from components.generate.config import HFRolloutConfig, SamplingConfig
from plugins.demo.tiny_model import learnt_tokenizer, tiny_model

Steps = list[dict[str, Any]]
EpisodeRunner = Callable[[str], str]
"""Policy: function from the text of the environment to the next action."""


def text_of(said: Any) -> str:
    return said if isinstance(said, str) else "\n".join(message["content"] for message in said)


def run_episodes(
    environment: AgentInstanceBase, prompt: str, label: Any, runner: EpisodeRunner, turns: int = 30
) -> Steps:
    """Run an episode to its end or to a maximum number of turns, and return the results of all steps."""

    async def episode() -> Steps:
        said = (await environment.reset({"observation": prompt, "label": label}))["observation"]
        steps: Steps = []
        while len(steps) < turns and not (steps and steps[-1]["done"]):
            states = {"observation_text": "", "action_text": runner(text_of(said)), "label": label}
            steps.append(await environment.step(states))
            said = steps[-1]["environment_feedback"]
        return steps

    return asyncio.run(episode())


def saying(*words: str) -> EpisodeRunner:
    """Return a policy that writes the texts one after the other."""
    left = list(words)
    return lambda _said: left.pop(0)


def halving(low: int, high: int, smaller: str, larger: str, write: str = "{}") -> EpisodeRunner:
    """Return a policy that guesses the middle of the remaining range."""
    bounds = [low, high]

    def guess_middle(said: str) -> str:
        middle = sum(bounds) // 2
        if smaller in said:
            bounds[1] = middle - 1
        elif larger in said:
            bounds[0] = middle + 1
        return write.format(sum(bounds) // 2)

    return guess_middle


def rewards(steps: Steps) -> list[float]:
    return [step["rewards"] for step in steps]


def write_policy(folder: Path) -> Path:
    """Create a tiny untrained model with a chat template."""
    tokenizer = learnt_tokenizer(["Play the game. Write one of: 1 2 3 [user] [assistant] [system] [tool]"] * 8, 300)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tiny_model(tokenizer, seed=0, hidden=32, layers=1, max_positions=4096).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def play_untrained(name: str, label: Any, policy: Path) -> None:
    """Run four episodes of a shipped environment with a policy, and check that none ends as an error."""
    check_agent(f"env:{name}")
    agent = AgentOptions(func_path=f"env:{name}", max_turns=3)
    runner = open_runner(str(policy), HFRolloutConfig(), agent, lambda: load_tokenizer(policy))
    prompt = TextEncoder(load_tokenizer(policy)).encode_prompt("Play the game.")
    ids = {"prompt_id": torch.zeros(4, dtype=torch.int64), "sample_id": torch.arange(4)}
    objects = {"prompt": ["Play the game."] * 4, "label": [label] * 4}
    batch = runner.generate(Batch.from_rows({"tokens": [prompt] * 4}, ids, objects), SamplingConfig(max_new_tokens=5))
    runner.close()
    assert batch["error"] == [""] * 4
    assert set(batch["status"]) <= {"finished", "truncated"}
    assert int(batch["num_turns"].min()) >= 1
