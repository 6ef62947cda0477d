"""verl's keys of episodes with tools and interactions (`multi_turn`) as the options of an agent."""

from pathlib import Path

import agents
from training.options.table_adapter import Computed

TOOL_AGENT = Path(agents.__file__).with_name("verl_tools.py")
"""The agent file that runs verl's tools and interactions."""
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
AGENTS = (
    "episodes are run with the tools and interactions of multi_turn.tool_config_path, .function_tool_path and "
    ".interaction_config_path, or by an agent of your own: set agent.func_path to a Python file (docs/agents.md), and "
    "leave this key out"
)


def read_agent(keys: Computed) -> None:
    """Read the files of tools and interactions, and the limits on turns and tokens."""
    named = {name: key for name in FILES if (key := keys.name(f"{TURNS}.{name}", f"data.{name}"))}
    loop_key = f"{ROLLOUT}.agent.default_agent_loop"
    loop = keys.get(loop_key, default=SINGLE_TURN)
    others = [key for key in keys.given if key.endswith(("agent_loop_config_path", "custom_agent_loop_loader"))]
    keys.faults += [f"{key}={keys.given[key]}: {AGENTS}" for key in others if keys.given[key]]
    if loop not in (SINGLE_TURN, TOOLS):
        keys.faults.append(f"{loop_key}={loop}: {AGENTS}")
    if not named:
        if (keys.get(f"{TURNS}.enable") or loop == TOOLS) and not others and not keys.option("agent.func_path"):
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
    given: dict[str, object] = {
        name: str(Path(str(keys.get(key))).expanduser().absolute()) for name, key in named.items()
    }
    given |= {name: value for name, value in arguments.items() if value is not None}
    keys.put("agent.func_path", str(TOOL_AGENT), first)
    keys.put("agent.arguments", given, first)
    keys.put("agent.rewarded_by", "reward", first)
    prompt, response = keys.option("data.max_prompt_tokens", 512), keys.option("rollout.max_new_tokens", 512)
    # Up to 0.4 the limit on the policy's turns was max_turns.
    assistant, user = (
        keys.get(f"{TURNS}.max_assistant_turns", f"{TURNS}.max_turns"),
        keys.get(f"{TURNS}.max_user_turns"),
    )
    limits = [limit for limit in (assistant, user and user + 1) if limit]
    # Without a limit on turns verl has that on tokens alone, of which a turn has one at least.
    keys.put("agent.max_turns", min(limits, default=response), f"{TURNS}.max_assistant_turns")
    keys.put("agent.max_tokens", prompt + response)
    keys.notes.append(
        f"an episode has at most data.max_prompt_length + data.max_response_length = {prompt + response} tokens; "
        "after a short prompt its turns and the tools' results may have more than in verl"
    )
