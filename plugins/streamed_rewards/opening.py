"""Opening of the rewards that are computed while responses are generated, if the options allow it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from components.registry import load
from components.rewards.base import FUNCTIONS, is_reward_file, reward_parts
from components.rewards.files import FUNCTION_NODES, parse_file, reward_function
from components.rewards.opening import open_reward
from components.rewards.servers import is_server
from plugins.streamed_rewards.scoring import StreamedRewards

if TYPE_CHECKING:
    from training.options.rl_options import RLOptions


def open_streamed_rewards(config: RLOptions, engine: Any) -> StreamedRewards | None:
    """Start the reward workers beside an engine. Return None if responses are scored after the generation."""
    if not config.reward.while_generating or config.agent.func_path:
        return None
    source = config.reward_source
    if source is None or not all(is_of_one(part) for _, part in reward_parts(source)):
        return None
    return StreamedRewards(engine, open_reward(source, config.reward.settings()), config.model.tokenizer())


def is_of_one(part: str) -> bool:
    """True if a part of a reward is computed from one response at a time."""
    if is_server(part):
        return False
    # Scorers are called once for each response.
    if not is_reward_file(part):
        return True
    path, name = reward_function(part)
    of_one = load(FUNCTIONS, "parameters of one", f"reward.source={part}")[:3]
    # Parsed and not imported, because the file runs in the processes of the reward only.
    for node in parse_file(str(path), "reward file").body:
        if isinstance(node, FUNCTION_NODES) and node.name == name:
            return not {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}.isdisjoint(of_one)
    return False
