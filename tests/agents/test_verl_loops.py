"""Episodes run by agent loops of the user in verl's format."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agents.episode import Episode
from agents.loading import load_agent
from agents.options import AgentOptions
from agents.verl_loops import AgentExecutor, AgentLoopBase, AgentLoopOutput, Draw, fill, read_loops, token_ids
from components.generate.async_engine import Generation
from tests.messages import says
from tests.recipes.tiny_models import byte_tokenizer

LOOP = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer


@register("mine")
class MyLoop(AgentLoopBase):
    pass
"""


def draw(prompt: Sequence[int], tokens: Sequence[int]) -> Draw:
    """A generation by weight version 3. The log-probability of a token is its id divided by 100."""
    return Draw(
        list(prompt), Generation(list(tokens), [-token / 100 for token in tokens], [3] * len(tokens), finish="stop")
    )


def test_sampled_tokens_form_turns_and_other_tokens_are_observations() -> None:
    episode = Episode([1, 2], 2)
    # Two turns with three environment tokens in between. The second turn is cut after two of its tokens.
    draws = [draw([1, 2], [10, 11]), draw([1, 2, 10, 11, 7, 8, 9], [20, 21, 22])]
    fill(episode, [10, 11, 7, 8, 9, 20, 21], [1, 1, 0, 0, 0, 1, 1], draws)
    assert episode.tokens == [1, 2, 10, 11, 7, 8, 9, 20, 21]
    assert [(turn.start, turn.end) for turn in episode.turns] == [(2, 4), (7, 9)]
    assert episode.logprobs == [0, 0, -0.1, -0.11, 0, 0, 0, -0.2, -0.21]
    assert episode.versions == [-1, -1, 3, 3, -1, -1, -1, 3, 3]


def test_a_masked_token_of_a_turn_is_excluded_from_training_and_the_others_are_kept() -> None:
    episode = Episode([1], 1)
    fill(episode, [10, 11, 12], [1, 0, 1], [draw([1], [10, 11, 12])])
    assert [(turn.start, turn.end) for turn in episode.turns] == [(1, 2), (3, 4)]
    assert episode.logprobs == [0, -0.1, 0, -0.12]


def test_two_consecutive_generations_are_two_turns() -> None:
    episode = Episode([1], 1)
    fill(episode, [10, 11], [1, 1], [draw([1], [10]), draw([1, 10], [11])])
    assert [(turn.start, turn.end) for turn in episode.turns] == [(1, 2), (2, 3)]


@pytest.mark.parametrize(
    ("response", "mask", "facts"),
    [([10, 99], [1, 1], ["token 1", "did not draw"]), ([10], [1, 1], ["2 numbers", "1 response_ids"])],
)
def test_a_mask_that_contradicts_the_generations_raises_an_error(
    response: list[int], mask: list[int], facts: list[str]
) -> None:
    with pytest.raises(ValueError, match=says("response_mask", *facts)):
        fill(Episode([1], 1), response, mask, [draw([1], [10, 11])])


def write(folder: Path, content: str) -> str:
    (folder / "my_loops_of_a_test.py").write_text(LOOP)
    path = folder / "loops.yaml"
    path.write_text(content)
    return str(path)


def test_the_file_selects_agent_loops_of_its_folder_with_separate_arguments(tmp_path: Path) -> None:
    path = write(tmp_path, "- {name: mine, _target_: my_loops_of_a_test.MyLoop, depth: 3}\n")
    assert {name: arguments for name, (_, arguments) in read_loops(path).items()} == {"mine": {"depth": 3}}
    executor = load_agent(str(Path(__file__).parents[2] / "agents/verl_loops.py"), {"path": path, "default": "mine"})
    assert type(executor).__name__ == AgentExecutor.__name__


@pytest.mark.parametrize(
    ("content", "default", "facts"),
    [
        ("- {name: mine}\n", "mine", ["_target_", "module.Class"]),
        ("- {name: mine, _target_: lost_module.Loop}\n", "mine", ["lost_module", "cannot be imported"]),
        ("- {name: mine, _target_: my_loops_of_a_test.MyLoop}\n", "yours", ["default_agent_loop=yours", "mine"]),
    ],
)
def test_an_invalid_file_of_agent_loops_raises_an_error_with_the_reason(
    tmp_path: Path, content: str, default: str, facts: list[str]
) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        AgentExecutor(write(tmp_path, content), default)
    with pytest.raises(ValueError, match=says("agent_loop_config_path", "lost.yaml")):
        AgentExecutor(str(tmp_path / "lost.yaml"))


@pytest.mark.parametrize(
    ("rewarded_by", "score", "facts"),
    [("environment", None, ["no reward_score", "reward"]), ("reward", 0.5, ["a reward_score", "environment"])],
)
def test_a_score_that_contradicts_the_reward_option_raises_an_error(
    tmp_path: Path, rewarded_by: Any, score: float | None, facts: list[str]
) -> None:
    executor = AgentExecutor(write(tmp_path, "- {name: mine, _target_: my_loops_of_a_test.MyLoop}\n"))
    output = AgentLoopOutput(prompt_ids=[1], response_ids=[10], response_mask=[1], reward_score=score)
    executor.open(AgentOptions(rewarded_by=rewarded_by))
    with pytest.raises(ValueError, match=says(*facts)):
        executor._episode(output, [draw([1], [10])])
    executor.open(AgentOptions(rewarded_by="reward" if rewarded_by == "environment" else "environment"))
    episode = executor._episode(output, [draw([1], [10])])
    assert (episode.reward, episode.is_rewarded) == (score or 0.0, score is not None)


def test_the_chat_template_is_applied_with_and_without_the_system_prompt() -> None:
    tokenizer = byte_tokenizer()
    messages = [{"role": "user", "content": "a"}]

    async def rendered(**options: Any) -> list[int]:
        class Config:
            config = None

        return await AgentLoopBase(Config, None, tokenizer).apply_chat_template(messages, **options)

    whole = asyncio.run(rendered())
    assert tokenizer.decode(whole) == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert asyncio.run(rendered(remove_system_prompt=True)) == whole  # this template adds no system prompt
    assert token_ids({"input_ids": [1, 2]}) == token_ids([1, 2]) == [1, 2]
