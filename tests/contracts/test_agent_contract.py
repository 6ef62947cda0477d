"""Contract of agents. To test your agent: pytest tests/contracts --target FILE.py.

An episode is one `reset`, and then `step` until it is done. The policy writes the texts of the samples.
"""

from __future__ import annotations

import pytest

from tests.contracts.agent_trial import AgentTrial
from tests.contracts.episodes import Episode, Played
from tests.contracts.samples import LONG_TEXT, UNUSUAL_LABELS, UNUSUAL_TEXTS, repeated

EPISODES = 8


def alone(agent: AgentTrial) -> Played:
    return agent.run_episodes("alone", repeated(agent.samples, EPISODES), "episodes one after the other")


def steady(agent: AgentTrial) -> list[Episode]:
    """Run episodes that others can be compared with, after a check that they are repeatable."""
    first = alone(agent).episodes
    if first != alone(agent).episodes:
        agent.fail("nothing can be compared: equal actions do not give equal episodes, which has its own contract")
    return first


def assert_same(agent: AgentTrial, expected: list[Episode], actual: list[Episode], problem: str) -> None:
    """Fail with the first turn that differs."""
    for number, (before, now) in enumerate(zip(expected, actual, strict=True)):
        if before.observation != now.observation:
            start = f"{before.observation!r:.100}, and then {now.observation!r:.100}"
            agent.fail(f"{problem} Episode {number} started with {start}.")
        turn = next((t for t, (old, new) in enumerate(zip(before.turns, now.turns)) if old != new), None)
        if turn is not None:
            results = f"{before.turns[turn]}, and then {now.turns[turn]}"
            agent.fail(f"{problem} Step {turn} of episode {number} returned {results}.")
        if len(before.turns) != len(now.turns):
            agent.fail(f"{problem} Episode {number} had {len(before.turns)} turns, and then {len(now.turns)}.")


def test_reset_and_step_return_valid_dicts(agent: AgentTrial) -> None:
    assert len(agent.play_first().episodes) == 1


def test_an_episode_ends_within_the_limit_of_turns(agent: AgentTrial) -> None:
    for number, episode in enumerate(alone(agent).episodes):
        if not episode.ended:
            agent.fail(
                f"episode {number} was not done after {agent.max_turns} turns; count them in step and return done, or "
                "allow more with --max-turns"
            )


def test_the_states_argument_is_not_changed(agent: AgentTrial) -> None:
    if changed := alone(agent).changed:
        agent.fail(f"{changed[0]}; change a copy, and return the changed values")


@pytest.mark.parametrize("text", [*UNUSUAL_TEXTS, "a very long text"])
def test_unusual_texts_of_a_policy_get_a_response(agent: AgentTrial, text: str) -> None:
    sample = agent.samples[0].answered(UNUSUAL_TEXTS.get(text, LONG_TEXT))
    agent.run_episodes("alone", [sample], f"a policy that writes {text}")


@pytest.mark.parametrize("label", UNUSUAL_LABELS)
def test_an_unusual_label_is_accepted_or_rejected_with_a_value_error(agent: AgentTrial, label: str) -> None:
    agent.run_episodes("unless_refused", [agent.samples[0].labelled(UNUSUAL_LABELS[label])], label)


@pytest.mark.repeatable
def test_equal_actions_give_equal_episodes(agent: AgentTrial) -> None:
    problem = "equal actions gave another episode; seed random numbers by the prompt or label, or set --allow-random."
    assert_same(agent, alone(agent).episodes, alone(agent).episodes, problem)


@pytest.mark.repeatable
def test_reset_restores_the_initial_state(agent: AgentTrial) -> None:
    again = agent.run_episodes("again", repeated(agent.samples, EPISODES), "episodes by one instance").episodes
    assert_same(agent, steady(agent), again, "reset has kept a part of the state; set every attribute in reset.")


@pytest.mark.repeatable
def test_two_instances_share_no_state(agent: AgentTrial) -> None:
    pair = repeated(agent.samples, 2)
    nested = agent.run_episodes("nested", pair, "an episode between the reset and the first step of another").episodes
    problem = "an episode changed another instance's state; keep the state in self, not in the class or the module."
    assert_same(agent, steady(agent)[:2], nested, problem)


@pytest.mark.repeatable
def test_concurrent_episodes_equal_sequential_ones(agent: AgentTrial) -> None:
    together = agent.run_episodes("together", repeated(agent.samples, EPISODES), "concurrent episodes").episodes
    problem = "concurrent episodes differ from sequential ones; keep the state in self, not in the class or the module."
    assert_same(agent, steady(agent), together, problem)
