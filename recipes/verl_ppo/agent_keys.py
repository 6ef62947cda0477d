"""verl's keys of episodes with tools and interactions (`multi_turn`) as the options of an agent."""

from collections.abc import Mapping
from pathlib import Path

import agents
from training.options.table_adapter import Computed

TOOL_AGENT = Path(agents.__file__).with_name("verl_tools.py")
"""The agent file that runs verl's tools and interactions."""
LOOP_AGENT = Path(agents.__file__).with_name("verl_loops.py")
"""The agent file that runs a user's own agent loops."""
SINGLE_TURN = "single_turn_agent"
"""verl's name of the agent that answers in one turn."""
TOOLS = "tool_agent"
"""verl's name of the agent that calls tools."""
ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
FORMATS = ("hermes", "qwen3_coder", "qwen", "chatml")
"""Forms of a call that are read (agents/tools.py). `qwen` and `chatml` are of 0.4, where calls are those of hermes."""
SIDES = ("left", "right", "middle")
ARGUMENTS = ("max_parallel_calls", "max_tool_response_length", "tool_response_truncate_side")
FILES = ("tool_config_path", "function_tool_path", "interaction_config_path")
"""Keys that name a file of tools or interactions, and the agent's arguments for them."""
LOADER = (
    "loops are named by a YAML file: set actor_rollout_ref.rollout.agent.agent_loop_config_path to one with a list of "
    "{name, _target_: module.Class}, and leave this key out"
)
AGENTS = (
    "episodes are run with the tools and interactions of multi_turn.tool_config_path, .function_tool_path and "
    ".interaction_config_path, by the loops of agent.agent_loop_config_path, or by an agent of your own: set "
    "agent.func_path to a Python file (docs/agents.md), and leave this key out"
)


def read_agent(keys: Computed) -> None:
    """Read the files of loops, tools and interactions, and the limits on turns and tokens."""
    named = {name: key for name in FILES if (key := keys.name(f"{TURNS}.{name}", f"data.{name}"))}
    loop_key = f"{ROLLOUT}.agent.default_agent_loop"
    file_key = f"{ROLLOUT}.agent.agent_loop_config_path"
    loop = keys.get(loop_key, default=SINGLE_TURN)
    loaders = [key for key in keys.values if key.endswith("custom_agent_loop_loader") and keys.values[key]]
    keys.faults += [f"{key}={keys.values[key]}: {LOADER}" for key in loaders]
    if keys.get(file_key) and not keys.option("agent.func_path") and not (loop == TOOLS and named):
        read_loop_agent(keys, file_key, loop, named)
        return
    keys.idle("agent.func_path runs the episodes, or verl's tool_agent", file_key)
    if loop not in (SINGLE_TURN, TOOLS):
        keys.faults.append(f"{loop_key}={loop}: {AGENTS}")
    if not named:
        if (keys.get(f"{TURNS}.enable") or loop == TOOLS) and not loaders and not keys.option("agent.func_path"):
            keys.faults.append(f"{TURNS}.enable without {TURNS}.tool_config_path: {AGENTS}")
        return
    first = next(iter(named.values()))
    if keys.option("agent.func_path"):
        keys.faults.append(f"{first} beside agent.func_path: {AGENTS}")
        return
    for key, known in ((f"{TURNS}.format", FORMATS), (f"{TURNS}.tool_response_truncate_side", SIDES)):
        if keys.get(key) not in (None, *known):
            keys.faults.append(f"{key}={keys.get(key)} is not here; set it to {', '.join(known)}")
    arguments = {name: keys.get(f"{TURNS}.{name}") for name in ARGUMENTS}
    paths = {name: str(Path(str(keys.get(key))).expanduser().absolute()) for name, key in named.items()}
    set_arguments = {name: value for name, value in arguments.items() if value is not None}
    keys.put("agent.func_path", str(TOOL_AGENT), first)
    keys.put("agent.arguments", {**paths, **set_arguments}, first)
    keys.put("agent.rewarded_by", "reward", first)
    _, response = limit_tokens(keys)
    # Up to 0.4 the limit on the policy's turns was max_turns.
    assistant = keys.get(f"{TURNS}.max_assistant_turns", f"{TURNS}.max_turns")
    user = keys.get(f"{TURNS}.max_user_turns")
    limits = [limit for limit in (assistant, user and user + 1) if limit]
    # Without a limit on turns verl limits only the tokens. A turn has at least one token.
    keys.put("agent.max_turns", min(limits, default=response), f"{TURNS}.max_assistant_turns")


def limit_tokens(keys: Computed) -> tuple[int, int]:
    """Set the maximum number of tokens of an episode, and return those of a prompt and of a response."""
    prompt, response = (keys.option(name, 512) for name in ("data.max_prompt_tokens", "rollout.max_new_tokens"))
    most = keys.option("agent.max_tokens", prompt + response)
    keys.put("agent.max_tokens", most)
    keys.notes.append(
        f"an episode has at most {most} tokens, of data.max_prompt_length + data.max_response_length = "
        f"{prompt + response}; after a short prompt its turns and the tools' results may have more than in verl"
    )
    return prompt, response


def read_loop_agent(keys: Computed, file_key: str, loop: str, named: Mapping[str, str]) -> None:
    """Run the episodes by the agent loops of a user's file.

    Args:
        keys: as in `read_agent`.
        file_key: key that names the file.
        loop: name of the loop of rows that name none.
        named: keys of files of tools and interactions, by what they are called; loops read them in their config.
    """
    prompt, response = limit_tokens(keys)
    path = Path(str(keys.get(file_key))).expanduser().absolute()
    turns = {
        name: keys.get(f"{TURNS}.{name}") for name in ("max_assistant_turns", "max_user_turns", "format", *ARGUMENTS)
    }
    turns |= {name: str(keys.get(key)) for name, key in named.items()}
    rollout = {
        "name": "vllm",
        "mode": "async",
        "n": keys.option("samples_per_prompt", 1),
        "temperature": keys.option("rollout.temperature", 1.0),
        "top_p": keys.option("rollout.top_p", 1.0),
        "prompt_length": prompt,
        "response_length": response,
        "max_model_len": prompt + response,
        "multi_turn": {"enable": True, **turns},
    }
    policy = {"rollout": rollout, "model": {"path": keys.option("model.path", "")}}
    data = {
        "max_prompt_length": prompt,
        "max_response_length": response,
        "apply_chat_template_kwargs": keys.option("model.template_arguments", {}),
    }
    config = {"actor_rollout_ref": policy, "data": data}
    keys.put("agent.func_path", str(LOOP_AGENT), file_key)
    keys.put("agent.arguments", {"path": str(path), "default": loop, "config": config}, file_key)
    if keys.option("agent.rewarded_by") is None:
        keys.put("agent.rewarded_by", "reward", file_key)
