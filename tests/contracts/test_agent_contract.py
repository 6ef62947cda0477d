"""What an agent promises. To hold yours to it: pytest tests/contracts --target FILE.py.

An episode is one `reset` and then `step` until it is done; the policy says what the samples tell it to.
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
    """Play episodes that others can be compared with."""
    first, again = alone(agent).episodes, alone(agent).episodes
    if first != again:
        agent.fail("nothing can be compared: the same actions do not give the same episode, which has its own contract")
    return first


def assert_same(agent: AgentTrial, expected: list[Episode], found: list[Episode], why: str) -> None:
    """Fail with the first turn that is another."""
    for number, (before, now) in enumerate(zip(expected, found, strict=True)):
        if before.observation != now.observation:
            agent.fail(
                f"{why} Episode {number} began with {before.observation!r:.100}, and then {now.observation!r:.100}."
            )
        turn = next((t for t, (old, new) in enumerate(zip(before.turns, now.turns)) if old != new), None)
        if turn is not None:
            agent.fail(f"{why} Step {turn} of episode {number} gave {before.turns[turn]}, and then {now.turns[turn]}.")
        if len(before.turns) != len(now.turns):
            agent.fail(f"{why} Episode {number} had {len(before.turns)} turns, and then {len(now.turns)}.")


def test_reset_and_step_return_what_they_have_to(agent: AgentTrial) -> None:
    assert len(agent.play_first().episodes) == 1


def test_an_episode_ends_within_the_limit_of_turns(agent: AgentTrial) -> None:
    for number, episode in enumerate(alone(agent).episodes):
        if not episode.ended:
            agent.fail(
                f"episode {number} was not done after {agent.max_turns} turns; count them in step and return done, or "
                "allow more with --max-turns"
            )


def test_the_states_it_is_given_stay_as_they_were(agent: AgentTrial) -> None:
    if changed := alone(agent).changed:
        agent.fail(f"{changed[0]}; change a copy, and return what is to be different")


@pytest.mark.parametrize("what", [*UNUSUAL_TEXTS, "a very long text"])
def test_whatever_a_policy_says_is_answered(agent: AgentTrial, what: str) -> None:
    agent.run_episodes(
        "alone", [agent.samples[0].answered(UNUSUAL_TEXTS.get(what, LONG_TEXT))], f"a policy that says {what}"
    )


@pytest.mark.parametrize("what", UNUSUAL_LABELS)
def test_an_unusual_label_is_played_or_refused_with_a_value_error(agent: AgentTrial, what: str) -> None:
    agent.run_episodes("unless_refused", [agent.samples[0].labelled(UNUSUAL_LABELS[what])], what)


@pytest.mark.repeatable
def test_the_same_actions_give_the_same_episode(agent: AgentTrial) -> None:
    why = "the same actions gave another episode; draw what is random from the prompt or label, or set --allow-random."
    assert_same(agent, alone(agent).episodes, alone(agent).episodes, why)


@pytest.mark.repeatable
def test_reset_begins_anew(agent: AgentTrial) -> None:
    again = agent.run_episodes("again", repeated(agent.samples, EPISODES), "episodes by one instance").episodes
    assert_same(agent, steady(agent), again, "after reset something was left; set everything anew in reset.")


@pytest.mark.repeatable
def test_two_instances_share_no_state(agent: AgentTrial) -> None:
    pair = repeated(agent.samples, 2)
    nested = agent.run_episodes("nested", pair, "an episode between the reset and the first step of another").episodes
    why = "an episode changed another instance's; keep its state in self, not in the class or the module."
    assert_same(agent, steady(agent)[:2], nested, why)


@pytest.mark.repeatable
def test_episodes_that_run_at_once_give_what_they_give_alone(agent: AgentTrial) -> None:
    together = agent.run_episodes("together", repeated(agent.samples, EPISODES), "episodes at once").episodes
    why = "at once the episodes went otherwise than alone; keep their state in self, not in the class or the module."
    assert_same(agent, steady(agent), together, why)
