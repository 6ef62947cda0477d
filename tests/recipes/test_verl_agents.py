"""verl's interactions, functions as tools and configurations by name, as the options of an agent."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agents.verl_tools import AgentInstance, check_interactions, tool_schemas
from recipes.verl_ppo.adapter import plain_arguments
from recipes.verl_ppo.config import VerlPPOConfig
from tests.messages import says
from tests.recipes.verl_commands import SMALL
from training.options.config import CommandLine, load_config
from training.options.schema import ConfigError

TURNS = "actor_rollout_ref.rollout.multi_turn"
USER = """
from verl.interactions.base import BaseInteraction


class CountingInteraction(BaseInteraction):
    ended = []

    async def start_interaction(self, instance_id=None, **kwargs):
        self.seen = {"start": kwargs}
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        self.seen |= {"messages": messages, "turn": kwargs}
        done = len(messages) > self.config["most"]
        return done, f"{len(messages)} messages", 0.5, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        self.ended.append(instance_id)
"""
FUNCTIONS = '''
from verl.tools.function_tool import function_tool


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first one
        b: the second one
    """
    return str(a + b)


@function_tool("look_up", schema={"type": "function", "function": {"name": "look_up"}})
async def search(word: str):
    return {"found": word}, 0.25, {}
'''


def write_interactions(folder: Path, class_name: str, **entry: Any) -> str:
    path = folder / "interactions.yaml"
    path.write_text(json.dumps({"interaction": [{"class_name": class_name, "config": {"most": 3}, **entry}]}))
    return str(path)


def play(agent: AgentInstance, label: str, *actions: str, **extra: Any) -> list[dict[str, Any]]:
    async def episode() -> list[dict[str, Any]]:
        await agent.reset({"observation": "the prompt", "label": label, "extra_info": extra})
        return [await agent.step({"action_text": action, "label": label}) for action in actions]

    return asyncio.run(episode())


def test_an_interaction_writes_the_user_turns_until_it_ends_the_episode(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(USER)
    path = write_interactions(tmp_path, "counting.CountingInteraction")
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    agent = AgentInstance(interaction_config_path=path)
    steps = play(agent, "7", "a", "b", interaction_kwargs={"name": "counting", "query": "q"}, raw_prompt=prompt)
    assert steps[0]["environment_feedback"] == [{"role": "user", "content": "3 messages"}]
    assert [step["done"] for step in steps] == [False, True]
    assert [step["rewards"] for step in steps] == [0.0, 0.0]  # the run's reward scores the episode
    assert steps[1]["extra_logs"]["turn_score"] == 0.5
    seen = agent._user.seen
    assert seen["start"] == {"name": "counting", "query": "q"}
    assert [message["content"] for message in seen["messages"]] == ["s", "u", "a", "3 messages", "b"]
    assert agent._user.ended == [agent._id]


def test_the_gsm8k_interaction_of_verl_runs_without_verl(tmp_path: Path) -> None:
    path = write_interactions(tmp_path, "verl.interactions.gsm8k_interaction.Gsm8kInteraction", name="gsm8k")
    kwargs = {"name": "gsm8k", "ground_truth": "18"}
    for extra in ({"interaction_kwargs": kwargs}, {}):  # a row need not name the only interaction
        steps = play(AgentInstance(interaction_config_path=path), "18", "it is 17", "it is 18", **extra)
        assert [step["done"] for step in steps] == [False, True]
        assert [step["extra_logs"]["turn_score"] for step in steps] == [0.0, 1.0]
        assert steps[0]["environment_feedback"][0]["role"] == "user"


def test_a_row_with_an_unknown_interaction_is_an_error(tmp_path: Path) -> None:
    path = write_interactions(tmp_path, "verl.interactions.gsm8k_interaction.Gsm8kInteraction", name="gsm8k")
    with pytest.raises(ValueError, match=says("interaction_kwargs.name", "'other'", "gsm8k")):
        play(AgentInstance(interaction_config_path=path), "1", interaction_kwargs={"name": "other"})
    with pytest.raises(ValueError, match=says("interaction_config_path", "no_such_module.Lost", "cannot be imported")):
        (tmp_path / "below").mkdir()
        check_interactions(write_interactions(tmp_path / "below", "no_such_module.Lost"))


def test_tool_calls_in_a_response_call_the_functions_marked_as_tools(tmp_path: Path) -> None:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    add, look_up = tool_schemas("", str(path))
    assert add["function"]["name"] == "add"
    assert add["function"]["parameters"]["properties"]["b"]["description"] == "the second one"
    assert look_up == {"type": "function", "function": {"name": "look_up"}}
    calls = [("add", {"a": 1, "b": 2}), ("look_up", {"word": "x"})]
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    agent = AgentInstance(function_tool_path=str(path), max_parallel_calls=2)
    (step,) = play(agent, "3", "".join(f"<tool_call>{text}</tool_call>" for text in texts))
    assert [message["content"] for message in step["environment_feedback"]] == ["3", '{"found": "x"}']
    assert step["extra_logs"]["tool_reward"] == 0.25
    (tmp_path / "none.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=says("function_tool_path", "function_tool")):
        tool_schemas("", str(tmp_path / "none.py"))


def test_a_file_of_interactions_or_functions_defines_an_agent(tmp_path: Path) -> None:
    interactions = write_interactions(tmp_path, "verl.interactions.gsm8k_interaction.Gsm8kInteraction")
    functions = tmp_path / "functions.py"
    functions.write_text(FUNCTIONS)
    keys = [f"{TURNS}.interaction_config_path={interactions}", f"{TURNS}.function_tool_path={functions}"]
    read = load_config(VerlPPOConfig, plain_arguments([*SMALL, *keys, f"{TURNS}.max_user_turns=3"]))
    assert read.has_verl_agent
    assert read.agent.arguments == {"function_tool_path": str(functions), "interaction_config_path": interactions}
    assert (read.agent.max_turns, read.agent.rewarded_by) == (4, "reward")
    with pytest.raises(ConfigError, match=says("custom_agent_loop_loader=a.b", "agent_loop_config_path")):
        load_config(
            VerlPPOConfig,
            plain_arguments([*SMALL, "actor_rollout_ref.rollout.agent.custom_agent_loop_loader=a.b"]),
        )


def test_max_turns_of_verl_0_4_limits_the_turns_of_the_policy(tmp_path: Path) -> None:
    path = write_interactions(tmp_path, "verl.interactions.gsm8k_interaction.Gsm8kInteraction")
    keys = [f"{TURNS}.interaction_config_path={path}", f"{TURNS}.max_turns=2", f"{TURNS}.format=chatml"]
    assert load_config(VerlPPOConfig, plain_arguments([*SMALL, *keys])).agent.max_turns == 2


def test_a_configuration_shipped_with_verl_is_selected_by_its_name(tmp_path: Path) -> None:
    path = write_interactions(tmp_path, "verl.interactions.gsm8k_interaction.Gsm8kInteraction")
    words = ["--config-path=elsewhere", "--config-name=gsm8k_multiturn_grpo_w_interaction"]
    small = [word for word in SMALL if not word.startswith("data.train_batch_size")]
    keys = [f"{TURNS}.interaction_config_path={path}", "actor_rollout_ref.rollout.name=vllm"]
    line = CommandLine(VerlPPOConfig, plain_arguments([*words, *small, *keys]))
    read = line.config()
    assert (read.prompts_per_step, read.data.max_prompt_tokens, read.agent.max_turns) == (256, 1024, 6)
    assert any("gsm8k_multiturn_grpo_w_interaction" in note for note in line.notes)
    # The command line has precedence.
    read = load_config(VerlPPOConfig, plain_arguments([*words, *SMALL, *keys, "data.max_prompt_length=99"]))
    assert (read.prompts_per_step, read.data.max_prompt_tokens) == (64, 99)
    with pytest.raises(ConfigError, match=says("--config-name=mine", "--config FILE")):
        load_config(VerlPPOConfig, plain_arguments(["--config-name=mine", *SMALL]))
