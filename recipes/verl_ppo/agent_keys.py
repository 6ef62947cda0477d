"""verl's keys of episodes with tools (`multi_turn`) as the options of an agent."""

from pathlib import Path

from training.options.adapter import Computed

TOOL_AGENT = Path(__file__).with_name("tool_agent.py")
"""The agent file that runs verl's tools."""
SINGLE_TURN = "single_turn_agent"
"""verl's name of the agent that answers in one turn."""
TOOLS = "tool_agent"
"""verl's name of the agent that calls tools."""
ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
FORMATS = ("hermes", "qwen3_coder")
"""Forms of a call that are read; see agents/tools.py."""
SIDES = ("left", "right", "middle")
ARGUMENTS = ("max_parallel_calls", "max_tool_response_length", "tool_response_truncate_side")
OTHER_AGENTS = ("interaction_config_path", "function_tool_path")
AGENTS = (
    "episodes are run with the tools of multi_turn.tool_config_path, or by an agent of your own: set agent.func_path "
    "to a Python file (docs/agents.md), and leave this key out"
)


def read_agent(keys: Computed) -> None:
    """Read the file of tools, and the limits on turns and tokens."""
    tools_key = keys.name(f"{TURNS}.tool_config_path", "data.tool_config_path")
    loop_key = f"{ROLLOUT}.agent.default_agent_loop"
    loop = keys.get(loop_key, default=SINGLE_TURN)
    others = [key for key in keys.given if key.endswith((*OTHER_AGENTS, "agent_loop_config_path"))]
    keys.faults += [f"{key}={keys.given[key]}: {AGENTS}" for key in others if keys.given[key]]
    if loop not in (SINGLE_TURN, TOOLS):
        keys.faults.append(f"{loop_key}={loop}: {AGENTS}")
    if tools_key is None:
        if (keys.get(f"{TURNS}.enable") or loop == TOOLS) and not others and not keys.option("agent.func_path"):
            keys.faults.append(f"{TURNS}.enable without {TURNS}.tool_config_path: {AGENTS}")
        return
    if keys.option("agent.func_path"):
        keys.faults.append(f"{tools_key} beside agent.func_path: {AGENTS}")
        return
    for key, known in ((f"{TURNS}.format", FORMATS), (f"{TURNS}.tool_response_truncate_side", SIDES)):
        if keys.get(key) not in (None, *known):
            keys.faults.append(f"{key}={keys.get(key)} is not here; set it to {', '.join(known)}")
    arguments = {name: keys.get(f"{TURNS}.{name}") for name in ARGUMENTS}
    path = str(Path(str(keys.get(tools_key))).expanduser().absolute())
    given = {name: value for name, value in arguments.items() if value is not None}
    keys.put("agent.func_path", str(TOOL_AGENT), tools_key)
    keys.put("agent.arguments", {"tool_config_path": path, **given}, tools_key)
    keys.put("agent.rewarded_by", "reward", tools_key)
    prompt, response = keys.option("data.max_prompt_tokens", 512), keys.option("rollout.max_new_tokens", 512)
    assistant, user = (keys.get(f"{TURNS}.max_{who}_turns") for who in ("assistant", "user"))
    limits = [limit for limit in (assistant, user and user + 1) if limit]
    # Without a limit on turns verl has that on tokens alone, of which a turn has one at least.
    keys.put("agent.max_turns", min(limits, default=response), f"{TURNS}.max_assistant_turns")
    keys.put("agent.max_tokens", prompt + response)
    keys.notes.append(
        f"an episode has at most data.max_prompt_length + data.max_response_length = {prompt + response} tokens; "
        "after a short prompt its turns and the tools' results may have more than in verl"
    )
